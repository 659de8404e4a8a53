# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning and distillation on texts: runs of both recipes, resumed ones, what is prepared and what is learned."""

import functools
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from same_bits import logits
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.recipes import distill, sft
from hf_mxfp4.recipes.post_training.policy import _write_texts
from hf_mxfp4.recipes.tasks import load_task, of_task
from hf_mxfp4.rl.config import count_quantized


pytestmark = pytest.mark.usefixtures("blank_pictures")
TINY = [
    "--study={tiny_hidden_size: 32, tiny_num_layers: 2, n_train: 64}", "--per_device_train_batch_size=8",
    "--max_steps=4", "--eval_steps=2", "--evaluate_n=16", "--logging_steps=1",
]  # fmt: skip
#: Recipe: its module, options of a tiny run, what is measured of texts, and the folder of what was trained.
RECIPES = {
    "sft": (sft, [*TINY, "--learning_rate=.01"], "loss", "policy"),
    "distill": (distill, [*TINY, "--study={sft_steps: 3, sft_batch_size: 8}"], "kl", "student"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(name)`: a run of the demo, smaller, with a checkpoint in the middle, each once: its folder and summary."""

    @functools.cache
    def once(name):
        module, tiny, *_ = RECIPES[name]
        out = tmp_path_factory.mktemp(name) / "out"
        return out, module.main([*tiny, f"--output_dir={out}", "--save_strategy=steps", "--save_steps=2"])

    return once


@pytest.mark.parametrize("name", RECIPES)
def test_the_demo_is_measured_before_while_and_after(run, name):
    (out, summary) = run(name)
    (*_, measure, trained) = RECIPES[name]
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["steps"] == 4
    assert summary["n_quantized"] == 14
    history = json.loads((out / "log_history.json").read_text())
    key = f"eval_arithmetic_{measure}"
    found = {entry["step"]: entry[key] for entry in history if key in entry}
    assert list(found) == [0, 2, 4]
    assert found[4] == summary["after"]["arithmetic"][measure]
    assert found[0] == summary["before"]["arithmetic"][measure]
    assert count_quantized(AutoModelForCausalLM.from_pretrained(out / trained)) == 14
    if name == "sft":
        assert found[0] > found[4] + 0.1
    else:
        assert summary["shared_tensors"] > 0
        assert summary["tokens_distilled"] > 4 * 8 * 4
        page = (out / "run_report.html").read_text()
        assert "a rise is forgetting" in page
        assert "Held-out KL" in page


@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_ends_with_the_same_numbers_and_weights(run, name, capsys):
    (out, summary) = run(name)
    (module, tiny, _, trained) = RECIPES[name]
    expected = logits(AutoModelForCausalLM.from_pretrained(out / trained))
    again = module.main([*tiny, f"--output_dir={out}", f"--resume_from_checkpoint={out}/checkpoint-2"])
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}
    told = capsys.readouterr().out
    assert "begun with other options: save_strategy=no (was steps), save_steps=500 (was 2)\n" in told
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out / trained)), expected)


def test_what_is_learned_ends_with_the_end_of_sequence(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.recipes.sft.TextRun.train", lambda run, trainer, *others, **named: trainer)
    trainer = sft.main([*RECIPES["sft"][1], f"--output_dir={tmp_path}/out"])
    row = trainer.train_dataset[0]
    eos = trainer.processing_class.eos_token_id
    assert row["input_ids"][-1] == row["labels"][-1] == eos
    assert row["labels"][0] == -100


@pytest.fixture
def options(tmp_path):
    """Of a run on texts in two files, which names no model and no output folder."""
    file = tmp_path / "sums.jsonl"
    prose = tmp_path / "prose.txt"
    file.write_text("".join(json.dumps({"question": f"{i}+{i}=", "answer": f"{2 * i}"}) + "\n" for i in range(30)))
    prose.write_text("1+1=2" * 40)
    words = [f"--text={file}", "--text_field=question,answer", "--eval_text", str(file), str(prose), "--use_cpu=true"]
    words += ["--bf16=false", "--save_strategy=no", "--report_to=none", "--dtype=float32"]
    return [*words, "--max_length=32", "--max_steps=2"]


@pytest.mark.parametrize("name", RECIPES)
def test_texts_of_the_user_are_learned_by_adapters_on_packed_weights(run, options, tmp_path, name):
    base = run(name)[0] / "base"
    out = tmp_path / "lora"
    own = ["--gptq=true"] if name == "distill" else []
    lora = ["--mode=packed", "--use_peft=true", "--lora_target_modules=all-linear", f"--model_name_or_path={base}"]
    summary = RECIPES[name][0].main([*options, *lora, *own, f"--output_dir={out}"])
    assert summary["after"].keys() == {"sums", "prose"}
    assert summary["n_quantized"] == 14
    assert (out / RECIPES[name][3] / "adapter_config.json").is_file()
    if name == "distill":
        assert summary["model"].endswith("14 layers rounded (GPTQ)")
        assert summary["teacher"] == str(base)
        assert summary["shared_tensors"] > 0
        return
    packed = AutoModelForCausalLM.from_pretrained(base, quantization_config=MXFP4RLConfig(mode="packed"))
    before = logits(packed)
    assert not torch.equal(logits(PeftModel.from_pretrained(packed, out / "policy")), before)


def test_what_is_rounded_is_smoothed_before_where_the_scheme_says_so(run, options, tmp_path, monkeypatch):
    base = str(run("distill")[0] / "base")
    words = [*options, f"--model_name_or_path={base}", "--gptq=true", "--preset=w4a8", "--save_steps=1"]
    words += ["--save_strategy=steps", f"--output_dir={tmp_path / 'out'}"]
    found = distill.main(words)
    assert found["model"] == f"{base}, smoothed at 8 places, 14 layers rounded (GPTQ)"
    assert found["teacher"] == base
    # A resumed run begins from what is there, or refuses it.
    monkeypatch.delattr("hf_mxfp4.recipes.post_training.policy.round_model")
    resumed = [*words, f"--resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-1'}"]
    assert distill.main(resumed)["after"] == found["after"]
    with pytest.raises(SystemExit, match="was prepared with .*'smooth': True"):
        distill.main([*resumed, "--smooth=false"])


def test_without_steps_a_preparation_is_measured_alone(tmp_path):
    words = ["--max_steps=0", "--gptq=true", "--preset=w4a8", "--smooth=false", "--study={save_policy: false}"]
    summary = distill.main([*RECIPES["distill"][1], *words, f"--output_dir={tmp_path / 'out'}"])
    assert summary["steps"] == 0
    assert summary["before"]["arithmetic"]["kl"] > 0
    assert summary["before"] == summary["after"]
    assert summary["model"].endswith(", 14 layers rounded (GPTQ)")
    texts = (tmp_path / "out" / "prepared.jsonl").read_text().splitlines()
    assert len(texts) == 64
    assert json.loads(texts[0])["text"].count("=") == 1


def test_texts_of_chats_leave_the_begin_of_sequence_to_the_tokenizer(tmp_path):
    make_tokenizer("qwen2", begins=True).save_pretrained(tmp_path)
    task = load_task("arithmetic", n_train=1, conversational=True)
    (text,) = Path(_write_texts(str(tmp_path), task, tmp_path / "texts.jsonl")).read_text().splitlines()
    whole = "<|im_end|><|im_start|>".join((task.train["prompt"][0][0]["content"], task.train["completion"][0]))
    assert json.loads(text) == {"text": f"{whole}<|im_end|>"}


def test_what_cannot_be_prepared_is_refused(run, options, tmp_path):
    root = run("distill")[0]
    on_student = [*options, f"--model_name_or_path={root}/student", f"--output_dir={tmp_path / 'a'}"]
    with pytest.raises(SystemExit, match="the teacher is quantized; name the original"):
        distill.main(on_student)
    with pytest.raises(SystemExit, match="student is quantized; take the original"):
        distill.main([*on_student, "--gptq=true", f"--output_dir={tmp_path / 'b'}"])


ROWS = Dataset.from_list([{"prompt": "1+1=", "completion": "2", "answer": "2"}])
CHAT = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}], "completion": "2", "answer": "2"}])


@pytest.mark.parametrize(
    ("rows", "learn", "expected"),
    [
        (ROWS, "text", {"text": "1+1=2"}),
        (CHAT, "text", {"messages": [*CHAT[0]["prompt"], {"role": "assistant", "content": "2"}]}),
        (ROWS, "completion", {"prompt": "1+1=", "completion": "2"}),
        (CHAT, "completion", {"prompt": CHAT[0]["prompt"], "completion": [{"role": "assistant", "content": "2"}]}),
        (ROWS, "generated", {"prompt": "1+1="}),
    ],
)
def test_what_is_learned_of_a_task(rows, learn, expected):
    assert of_task(rows, learn)[0] == expected


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("sft", ["--learn=generated"], "learn='generated' must be one of text, completion$"),
        ("sft", ["--modules_to_not_convert", "re:.*"], "matches no layer of Qwen2ForCausalLM"),
        (
            "sft",
            ["--use_peft=true", "--lora_target_modules=nope"],
            "nope not found in the base model.* The layers for --lora_target_modules are down_proj, gate_proj, ",
        ),
        ("distill", ["--evaluate_n=0"], "evaluate_n=0 must be at least 1"),
        ("distill", ["--learn=all"], "learn='all' must be one of text, completion, generated"),
        ("distill", ["--study={reload_check: 3}"], "study has no option 'reload_check'"),
    ],
)
def test_what_is_wrong_ends_with_a_message(name, words, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        RECIPES[name][0].main([*RECIPES[name][1], f"--output_dir={tmp_path / 'out'}", *words])
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        RECIPES[name][0].main([*RECIPES[name][1], f"--output_dir={tmp_path / 'used'}"])
