# SPDX-License-Identifier: Apache-2.0
"""`evaluate.py` from the command line to the result."""

import json
from pathlib import Path

import processes
import pytest
import torch
from datasets import Dataset
from tiny_models import make_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab.resume_log import ResumeLog
from hf_mxfp4.recipes.evaluate import main
from hf_mxfp4.recipes.evaluation import generate
from hf_mxfp4.recipes.evaluation.generate import Batch, complete_batches, tokenize
from hf_mxfp4.recipes.tasks import ALPHABET, load_task
from hf_mxfp4.recipes.tasks.tiny_model import build_byte_tokenizer, build_char_tokenizer, build_qwen2, supervised_warmup


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TASK = ["--task=arithmetic", "--evaluate_n=30", "--batch_size=8", "--use_cpu"]
SAMPLED = ["--samples=4", "--k=1,4"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A quantized policy that solves a part of the problems when it samples."""
    folder = tmp_path_factory.mktemp("policy") / "policy"
    base = folder.parent / "base"
    tokenizer = build_char_tokenizer(ALPHABET)
    model = build_qwen2(tokenizer, hidden_size=32, num_layers=2, intermediate_size=64, num_heads=2, max_positions=64)
    problems = load_task("arithmetic", n_test=30).test  # learned by heart, in part
    supervised_warmup(model, tokenizer, problems, steps=45, batch_size=30, learning_rate=3e-3, progress=False)
    model.save_pretrained(base)
    quantized = AutoModelForCausalLM.from_pretrained(base, quantization_config=MXFP4RLConfig())
    quantized.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory):
    """An evaluation that nobody disturbed: its folder and result."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, main([policy, *TASK, *SAMPLED, f"--output_dir={folder}"])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def completions(folder, name):
    """What a file of completions holds, by sample and problem."""
    return {(line["sample"], line["problem"]): line for line in lines(folder / name)[1:]}


def test_the_result_has_scheme_intervals_counts_and_what_is_needed_to_repeat_it(whole, policy, capsys):
    folder, result = whole
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["scheme"] == result["computed_in"] == MXFP4RLConfig().describe()
    assert (result["n"], result["n_quantized"], result["n_skipped"], result["control"]) == (30, 14, 1, None)
    assert result["weight_sqnr_db"] > 10
    measures = result["scores"]["exact_match"]
    assert list(measures) == ["greedy", "pass@1", "pass@4"]
    for name, of in measures.items():
        assert of["low"] <= of["value"] <= of["high"] and of["low"] < of["high"] and of["n"] == 30, name
    assert measures["greedy"]["method"] == "Wilson"
    assert "bootstrap" in measures["pass@4"]["method"]
    assert 0 < measures["pass@1"]["value"] < measures["pass@4"]["value"] <= 1
    assert result["generated"] == 150
    assert result["generation"]["temperature"] == 1.0
    assert result["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_estimates_are_those_of_the_completions(whole):
    folder, result = whole
    rows = load_task("arithmetic", n_test=30).test
    greedy = completions(folder, "greedy.jsonl")
    samples = completions(folder, "samples.jsonl")
    assert len(greedy) == 30
    assert len(samples) == 120
    for (_, problem), line in [*greedy.items(), *samples.items()]:
        assert line["correct"] == {"exact_match": line["completion"] == rows[problem]["answer"]}
        assert 1 <= line["n_tokens"] <= 4
        # What does not end has all four tokens; the end takes one.
        assert line["n_tokens"] == 4 if line["truncated"] else len(line["completion"]) < line["n_tokens"]
    measures = result["scores"]["exact_match"]
    right = [sum(samples[sample, problem]["correct"]["exact_match"] for sample in range(4)) for problem in range(30)]
    assert measures["pass@1"]["value"] == pytest.approx(sum(right) / 120)
    assert measures["pass@4"]["value"] == pytest.approx(sum(count > 0 for count in right) / 30)
    assert measures["greedy"]["value"] == sum(line["correct"]["exact_match"] for line in greedy.values()) / 30
    assert result["problems"]["correct"]["sampled"]["exact_match"] == right
    assert result["lengths"]["sampled"]["truncated"] == sum(line["truncated"] for line in samples.values())


def test_an_evaluation_that_was_killed_goes_on_to_the_same_completions(whole, policy, tmp_path, monkeypatch):
    add = ResumeLog.add
    calls = []

    def die_in_the_middle(self, line):
        calls.append(1)
        if len(calls) > 70:
            raise OSError("killed")
        add(self, line)

    command = [policy, *TASK, *SAMPLED, f"--output_dir={tmp_path}"]
    monkeypatch.setattr(ResumeLog, "add", die_in_the_middle)
    with pytest.raises(OSError, match="killed"):
        main(command)
    monkeypatch.undo()
    there = len(lines(tmp_path / "greedy.jsonl")) + len(lines(tmp_path / "samples.jsonl")) - 2
    assert 0 < there < 150
    assert not (tmp_path / "result.json").exists()
    # The process died as it wrote: half a line.
    with (tmp_path / "samples.jsonl").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 20)
    resumed = main(command)
    assert resumed["generated"] == 150 - there + 1
    folder, result = whole
    for name in ("greedy.jsonl", "samples.jsonl"):
        assert completions(tmp_path, name) == completions(folder, name)
        assert len(lines(tmp_path / name)) == len(lines(folder / name))  # none twice
    assert resumed["scores"] == result["scores"]
    assert main(command)["generated"] == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--temperature=0.5"], "temperature 1.0, not 0.5"),
        (["--max_new_tokens=3"], "max_new_tokens 4, not 3"),
        (["--dequantize"], "computed_in w4a8"),
        (["--dtype=bfloat16"], "dtype float32, not bfloat16"),
        (["--attn_implementation=eager"], "attention sdpa, not eager"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_completions_made_in_another_way_are_not_mixed(whole, policy, change, named):
    folder, _ = whole
    before = (folder / "samples.jsonl").read_bytes()
    with pytest.raises(SystemExit) as caught:
        main([policy, *TASK, *SAMPLED, f"--output_dir={folder}", *change])
    assert named in str(caught.value)
    assert "start over with --overwrite" in str(caught.value)
    assert (folder / "samples.jsonl").read_bytes() == before


def test_a_control_is_compared_problem_by_problem(whole, policy, tmp_path, capsys):
    folder, own = whole
    control = main([policy, *TASK, "--dequantize", f"--output_dir={tmp_path}", f"--compare={folder / 'result.json'}"])
    assert control["control"]
    assert control["n_quantized"] == 0
    [row] = control["differences"]
    a, b = (result["problems"]["correct"]["greedy"]["exact_match"] for result in (control, own))
    assert row["difference"]["value"] == pytest.approx((sum(a) - sum(b)) / 30)
    assert row["only_first"] == sum(x > y for x, y in zip(a, b, strict=True))
    assert row["only_second"] == sum(x < y for x, y in zip(a, b, strict=True))
    assert "CONTROL: full precision on the master weights" in capsys.readouterr().out
    files = [str(folder / "result.json"), f"--compare={tmp_path / 'result.json'}"]
    [reverse] = main(files)["differences"]
    assert reverse["difference"]["value"] == -row["difference"]["value"]
    assert reverse["difference"]["low"] == pytest.approx(-row["difference"]["high"])


def test_results_of_other_problems_are_not_compared(whole, policy, tmp_path):
    compare = f"--compare={whole[0] / 'result.json'}"
    with pytest.raises(SystemExit, match="not of the same problems .29 of arithmetic and 30 of .* in common"):
        main([policy, "--task=arithmetic", "--evaluate_n=29", f"--output_dir={tmp_path}", compare])
    assert not (tmp_path / "greedy.jsonl").exists()  # said before any work is done
    (tmp_path / "no.json").write_text('{"task": "arithmetic"}')
    with pytest.raises(SystemExit, match="is no result of evaluate.py: it has no model, computed_in, scores, problems"):
        main([str(tmp_path / "no.json"), compare])
    with pytest.raises(SystemExit, match="name another one with --compare"):
        main([str(whole[0] / "result.json")])


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A model of bytes that has learned nothing."""
    folder = tmp_path_factory.mktemp("writer")
    tokenizer = build_byte_tokenizer()
    build_qwen2(tokenizer, hidden_size=32, num_layers=1, num_heads=2, max_positions=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def golden_completions(monkeypatch, texts):
    decode = iter(texts)
    original = generate._generate
    monkeypatch.setattr(generate, "_generate", lambda *args: [(next(decode), *rest) for _, *rest in original(*args)])


@pytest.mark.parametrize(
    ("score", "answer", "right", "wrong", "found"),
    [
        ("exact_match", "blue", " blue\n", "blue.", [0.5]),
        ("number", "1200", "#### 1,200", "so it is 1200", [0.5, 1.0]),
        ("math", r"\frac{1}{2}", r"\boxed{0.5}", r"\boxed{2}", [0.5, 0.5]),
        ("gsm8k", "3+4=<<3+4=7>>7\n#### 7", "seven\n#### 7", "so it is 7", [0.5, 1.0]),
    ],
)
def test_a_file_is_read_strictly_and_flexibly(writer, tmp_path, monkeypatch, score, answer, right, wrong, found):
    if score == "math":
        pytest.importorskip("math_verify")
    rows = [{"q": str(i), "gold": answer, "question": str(i), "answer": answer} for i in range(2)]
    file = write(tmp_path / "mine.jsonl", rows)
    golden_completions(monkeypatch, [right, wrong])
    options = ["--task=file", "--prompt_column=q", "--answer_column=gold", f"--score={score}"]
    options = ["--task=gsm8k"] if score == "gsm8k" else options
    result = main([writer, *options, f"--eval_dataset={file}", "--max_new_tokens=2", f"--output_dir={tmp_path}/out"])
    assert [measures["greedy"]["value"] for measures in result["scores"].values()] == found  # strict comes first
    assert result["scheme"] is None
    assert result["computed_in"].startswith("full precision")


def test_conversations_go_through_the_chat_template(writer, tmp_path):
    file = write(tmp_path / "mine.jsonl", [{"prompt": "hello", "answer": "x"}] * 3)
    options = ["--task=file", f"--eval_dataset={file}", "--max_new_tokens=2"]
    main([writer, *options, "--study={conversational: false}", f"--output_dir={tmp_path}/plain"])
    main([writer, *options, f"--output_dir={tmp_path}/chat"])
    plain, chat = (lines(tmp_path / name / "greedy.jsonl")[0]["prompts"] for name in ("plain", "chat"))
    assert plain != chat


def test_plain_prompts_get_the_begin_of_sequence_that_training_gave_them_and_chats_do_not_get_two():
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    assert tokenize(tokenizer, ["a"])["input_ids"] == tokenizer(["a"])["input_ids"] == [[begin, ord("a") + 2]]
    chat = tokenize(tokenizer, [[{"role": "user", "content": "a"}]])["input_ids"]
    assert tokenizer.decode(chat[0]) == "user: a\nassistant: "


def drawn(model, tokenizer, batches, **options):
    data = Dataset.from_dict({"prompt": ["1+1=", "2+20=", "3+3="], "answer": ["2", "22", "6"]})
    rounds = complete_batches(model, tokenizer, data, {}, batches, max_new_tokens=4, **options)
    return {one.key: one.completion for found in rounds for one in found}


def test_draws_depend_on_the_seed_and_leave_the_random_state_alone():
    model = make_model(layers=1, hidden=32, intermediate=32, vocab_size=14)
    tokenizer = build_char_tokenizer(ALPHABET)
    first, second = (Batch((2, 0), 0, seed) for seed in (1, 2))
    state = torch.random.get_rng_state()
    once = drawn(model, tokenizer, [first])
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert drawn(model, tokenizer, [second, first]) == once
    assert drawn(model, tokenizer, [second]) != once
    found = drawn(model, tokenizer, [Batch((0, 1, 2), 0, 1), Batch((0, 1, 2))], temperature=1e-4)
    assert [found[0, i] for i in range(3)] == [found[None, i] for i in range(3)]


def test_a_completion_ends_with_the_end_of_sequence_of_the_tokenizer_or_of_the_checkpoint():
    model = make_model(layers=1, hidden=32, intermediate=32, vocab_size=14)
    tokenizer = build_char_tokenizer(ALPHABET)
    tokenizer.eos_token, model.generation_config.eos_token_id = "9", tokenizer.convert_tokens_to_ids("7")
    assert drawn(model, tokenizer, [Batch((0, 2))]) == {(None, 0): "9", (None, 2): "07"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampels=3"], "no option 'sampels'; did you mean 'samples'"),
        (["--task=gsm8k", "--eval_dataset=empty.jsonl"], "empty.jsonl is empty: no JSON lines in it"),
        (["--task=file", "--eval_dataset=x", "--score=maths"], "unknown score 'maths': the scores are"),
        (["--task=arithmetic", "--evaluate_n=0"], "evaluate_n=0 must be at least 1"),
        (["--samples=4", "--k=1,8"], "--k 1,8 must be whole numbers such as 1,4,16, from 1 to --samples 4"),
        (["--reward=f.py:length"], "--reward is for training"),
        (["--samples=1", "--temperature=0"], "--temperature 0.0 must be above 0"),
        (["--task=arithmetic", "--max_new_tokens=64"], "more than the 64 positions of the model"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_options_end_with_a_message(policy, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("\n")
    with pytest.raises(SystemExit, match="error: ") as caught:
        main([policy, f"--output_dir={tmp_path / 'out'}", *options])
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_two_processes_find_what_one_finds(whole, policy, tmp_path):
    words = [policy, *TASK, *SAMPLED, f"--output_dir={tmp_path}"]
    job = processes.script(HERE / "run_and_leave.py", ROOT / "recipes" / "evaluate.py", *words)
    done = processes.run(job, ranks=2, timeout=300)
    assert done.returncode == 0, done.output[-3000:]
    assert done.stdout.count("left properly") == 2, done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    folder, alone = whole
    assert result["processes"] == 2
    assert result["scores"] == alone["scores"]
    for name in ("greedy.jsonl", "samples.jsonl"):
        assert completions(tmp_path, name) == completions(folder, name)
