# SPDX-License-Identifier: Apache-2.0
import contextlib
import errno
import io
import json
import os
from pathlib import Path
from unittest.mock import Mock

import processes
import pytest
import torch
import yaml
from same_bits import assert_same, tensors_in
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import last_complete_checkpoint
from hf_mxfp4.lab import page
from hf_mxfp4.lab.evaluation.intervals import wilson
from hf_mxfp4.recipes import distill, grpo, sft
from hf_mxfp4.recipes.evaluation import generate
from hf_mxfp4.recipes.grpo import main
from hf_mxfp4.recipes.post_training.arguments import parse, parse_or_exit
from hf_mxfp4.rl.config import count_quantized
from hf_mxfp4.rl.run_log import RUN_LOG


pytestmark = pytest.mark.usefixtures("blank_pictures")
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs"
TINY = [
    "--study={sft_steps: 3, sft_batch_size: 8, tiny_hidden_size: 32, tiny_num_layers: 2, n_train: 200}",
    "--per_device_train_batch_size=8", "--num_generations=4", "--max_steps=3", "--logging_steps=1", "--error_every=1",
    "--aqn_num_stages=3", "--study={reload_check: 16, greedy_batch_size: 8}", "--report_every=0",
]  # fmt: skip
#: For runs whose report is looked at, and the log that it is made of.
REPORTED = "--report_every=100"


def short_run(folder, *options, config="tiny_cpu"):
    config = ["--config", str(CONFIGS / f"{config}.yaml")]
    return main([*config, *TINY, "--evaluate_n=16", f"--output_dir={folder}", *options])


def logged(folder, kind):
    """The lines of one kind in the log that the report is made of."""
    lines = map(json.loads, (folder / RUN_LOG).read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a report, without the pictures in it: its folder, its summary, and what it printed."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setitem(page._environment().filters, "png_base64", lambda figure: "")
        return folder, short_run(folder, REPORTED), printed.getvalue()


RELOAD = """
import json, sys
import hf_mxfp4
from hf_mxfp4.recipes.evaluation.generate import evaluate_greedy
from hf_mxfp4.recipes.tasks import load_task
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
task = load_task("arithmetic", n_test=16)
model = AutoModelForCausalLM.from_pretrained(folder + "/policy")
tokenizer = AutoTokenizer.from_pretrained(folder + "/policy", padding_side="left")
result = evaluate_greedy(model, tokenizer, task.test, task.scores, max_new_tokens=4, batch_size=8)
print(json.dumps(result.completions))
"""


def test_the_whole_recipe_and_a_reload_in_a_new_process(whole):
    folder, summary, table = whole
    assert summary["n_quantized"] == 14
    assert summary["n_skipped"] == 1
    assert summary["steps"] == 3
    assert summary["reloaded"] == {"compared": 16, "identical": 16}
    assert summary["scheme"] == MXFP4RLConfig().describe()
    history = json.loads((folder / "log_history.json").read_text())
    assert [line["aqn/sigma"] for line in history if "aqn/sigma" in line] == pytest.approx([0, 1e-2, 1e-3])
    assert "exact_match" in (folder / "policy" / "README.md").read_text()  # the model card has the evaluation
    assert summary["bytes_on_disk"] == sum(f.stat().st_size for f in (folder / "policy").iterdir())
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "run_report.html").read_text()
    for when in ("before", "after"):
        accuracy = wilson(round(16 * summary[f"accuracy_{when}"]["exact_match"]), 16)
        assert f"{accuracy} ({when} RL)" in report
    assert f"run report {folder / 'run_report.html'}\n" in table  # on one line, however long the path
    assert f"{accuracy}  (" in table
    # On the same problems before and after.
    change = summary["accuracy_change"]["exact_match"]
    assert change["value"] == summary["accuracy_after"]["exact_match"] - summary["accuracy_before"]["exact_match"]
    assert "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**change) in table
    assert "(95 %, n = 16)" in table
    for row in ("greedy, before RL", "greedy, after RL", "alarms of entropy", "quantized layers", "size on disk"):
        assert row in table

    environment = {**os.environ, "HF_MXFP4_VERBOSITY": "info"}
    process = processes.run(processes.code(RELOAD, folder), environment=environment)
    assert process.returncode == 0, process.stderr[-2000:]
    lines = (folder / "completions_after.jsonl").read_text().splitlines()
    assert json.loads(process.stdout.splitlines()[-1]) == [json.loads(line)["completion"] for line in lines]
    (told,) = (line for line in process.stderr.splitlines() if "hf_mxfp4" in line)
    assert told.startswith("[hf_mxfp4] Qwen2ForCausalLM: ")
    assert "hf_mxfp4" not in process.stdout
    assert "n_quantized=14 n_skipped=1 (lm_head)" in told
    assert MXFP4RLConfig().describe() in told


def test_all_evaluations_of_a_run_in_mixed_precision_are_in_it(tmp_path, monkeypatch):
    found = []
    original = generate.complete_batches

    def recording(*args, **kwargs):
        found.append(torch.is_autocast_enabled("cpu"))
        return original(*args, **kwargs)

    monkeypatch.setattr(generate, "complete_batches", recording)
    summary = short_run(tmp_path / "out", "--bf16=true", "--evaluate_every=3", "--max_steps=3")
    assert found == [True] * 4  # before, while training, after, reloaded
    assert summary["reloaded"]["identical"] == summary["reloaded"]["compared"] == 16


def test_evaluations_while_training_do_not_change_it(tmp_path):
    weights = []
    for every in (1, 0):
        folder = tmp_path / f"every{every}"
        options = [f"--evaluate_every={every}", "--study={reload_check: 0}", "--evaluate_n=8"]
        short_run(folder, *options)
        weights.append(tensors_in(folder / "policy"))
    assert_same(*weights)


def test_a_policy_may_be_sampled_under_another_scheme_than_it_trains_in(tmp_path, monkeypatch):
    sampled = []
    original = generate.complete_batches

    def noting(model, *args, **kwargs):
        sampled.append(count_quantized(model))
        return original(model, *args, **kwargs)

    monkeypatch.setattr(generate, "complete_batches", noting)
    words = ["--full_precision=true", "--study={rollout_scheme: rceil}", "--aqn=false", "--max_steps=2"]
    summary = short_run(tmp_path / "out", *words)
    assert sampled == [14] * 3
    assert summary["n_quantized"] == 0
    assert summary["reloaded"]["identical"] == 16
    assert summary["model"].endswith("sampled under rceil")
    short_run(tmp_path / "plain", words[0], *words[2:])
    logs = [json.loads((tmp_path / name / "log_history.json").read_text()) for name in ("out", "plain")]
    mismatch, rounding = ([line["sampling/kl"] for line in log if "sampling/kl" in line] for log in logs)
    assert len(mismatch) == len(rounding) == 2
    assert min(mismatch) > 100 * max(rounding)


def test_without_steps_a_saved_policy_is_evaluated_under_a_scheme(whole, tmp_path):
    policy = whole[0] / "policy"
    words = [
        "--max_steps=0",
        "--study={save_policy: false}",
        "--study={evaluate_before: false}",
        f"--model_name_or_path={policy}",
    ]
    summary = short_run(tmp_path / "out", *words)
    assert summary["steps"] == 0
    assert summary["accuracy_before"] is None
    assert summary["n_quantized"] == 14
    assert summary["accuracy_after"] == whole[1]["accuracy_after"]


def test_a_reload_that_fails_loses_nothing_and_is_still_an_error(tmp_path, capsys, monkeypatch):
    load = AutoModelForCausalLM.from_pretrained

    def no_room_for_a_second_one(source, **options):
        if Path(source).name == "policy":
            raise torch.OutOfMemoryError("no memory left")
        return load(source, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", no_room_for_a_second_one)
    out = tmp_path / "out"
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        short_run(out)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reloaded"] is None
    assert summary["accuracy_after"]["exact_match"] >= 0
    assert summary["seconds"] > 0
    assert len((out / "completions_after.jsonl").read_text().splitlines()) == 16
    assert "exact_match" in (out / "policy" / "README.md").read_text()
    assert "reloading failed all results are written; --study '{reload_check: 0}'" in capsys.readouterr().out


def test_options_of_the_products_in_yaml_and_on_the_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    plain = "preset: w4a4g4\nmacro_block: null\noutlier_fallback: null\n"
    path.write_text(plain + "use_cpu: true\nbf16: false\ndgrad:\n  grad: rceil+stochastic\n")
    words = ["--config", str(path), f"--output_dir={tmp_path}", "--wgrad", "{rotation: deterministic-16}"]
    common = {"preset": "w4a4g4", "macro_block": None, "outlier_fallback": None}
    common["wgrad"] = {"rotation": "deterministic-16"}
    assert parse(words)[1] == MXFP4RLConfig(**common, dgrad={"grad": "rceil+stochastic"})
    words += ["--dgrad=none"]
    assert parse(words)[1] == MXFP4RLConfig(**common, dgrad=None)
    with pytest.raises(ValueError, match="dgrad has no option 'grd'; did you mean 'grad'"):
        parse([*words, "--dgrad={grd: full}"])
    with pytest.raises(ValueError, match="dgrad='{grad: full' is neither YAML nor JSON"):
        parse([*words, "--dgrad={grad: full"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--presett=w4a4"], "no option 'presett'; did you mean 'preset'"),
        (["--preset=w4"], "preset='w4' is not supported; choose one of 'w4a16', 'w4a8', 'w4a8g8', 'w4a4'"),
        (["--config=nowhere.yaml"], "cannot read nowhere.yaml: No such file"),
        (["--outlier_fallback=abc"], "invalid float value: 'abc'"),
        (["--load_in_4bit=true"], "bitsandbytes"),
        (["--distill_steps=-1"], "distill_steps=-1 must be at least 0"),
        (["--evaluate_n=0"], "evaluate_n=0 must be at least 1"),
        (["--study={sft_step: 3}"], "study has no option 'sft_step'; did you mean 'sft_steps'"),
        (["--study=3"], "study must hold one `option: value` per line"),
        (["--study={evaluate_every_n: 0}"], "evaluate_every_n=0 must be at least 1"),
        ("presett: w4a4\n", "no option 'presett'; did you mean 'preset'"),
        ("preset: [w4a4\n", "not valid YAML"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_options_end_with_a_message(options, message, tmp_path):
    if isinstance(options, str):  # what a file says
        (tmp_path / "run.yaml").write_text(options)
        options = ["--config", str(tmp_path / "run.yaml")]
    with pytest.raises(SystemExit, match="error: ") as caught:
        parse_or_exit([f"--output_dir={tmp_path}", *options])
    assert message in str(caught.value)


def test_completions_of_one_line_are_refused_under_vllm(tmp_path):
    with pytest.raises(SystemExit, match="'few_shot_steps' end with their line, which use_vllm cannot do"):
        main(["--task=few_shot_steps", "--use_vllm=true", "--use_cpu=true", f"--output_dir={tmp_path}"])


EMPTY = "--eval_dataset=empty.jsonl"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model_name_or_path=./nowhere"], "cannot load the model '.*nowhere': there is no such folder"),
        (["--task=gsm8k", "--dataset=missing.jsonl", EMPTY], "missing.jsonl"),
        (["--task=gsm8k", "--dataset=empty.jsonl", EMPTY], "empty.jsonl is empty"),
        (["--resume_from_checkpoint=true"], "nothing to resume: .* holds no complete checkpoint"),
    ],
    ids=["model", "missing-data", "empty-data", "no-checkpoint"],
)
def test_what_is_missing_is_named_before_there_is_a_trainer(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    monkeypatch.setattr("hf_mxfp4.recipes.grpo.MXFP4GRPOTrainer", None)
    with pytest.raises(SystemExit, match=message):
        short_run("out", *words)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr("hf_mxfp4.recipes.common.options.torch", Mock(**{"cuda.is_available.return_value": False}))
    with pytest.raises(SystemExit, match="made for a GPU and none was found"):
        short_run("out", config="qwen2.5_3b_gsm8k")


def test_a_used_folder_is_not_written_over(whole):
    results = (whole[0] / "summary.json").read_bytes()
    with pytest.raises(SystemExit, match="is not empty; choose another"):
        main([*TINY, f"--output_dir={whole[0]}", "--overwrite=false"])
    assert (whole[0] / "summary.json").read_bytes() == results


def test_a_run_writes_down_every_option_that_it_used(whole):
    options = yaml.safe_load((whole[0] / "resolved_config.yaml").read_text())["options"]
    given = {"aqn_num_stages": 3, "max_steps": 3}
    assert given.items() <= options.items()  # from the command line
    study = {"tiny_hidden_size": 32, "n_train": 200, "greedy_batch_size": 8}
    assert study.items() <= options["study"].items()
    assert options["task"] == "arithmetic" and options["learning_rate"] == 1e-4  # from the file
    assert options["aqn"] is True  # from the file
    assert options["rollout_correction"] == "token_truncate"  # by default
    assert options["max_completion_length"] == 4
    assert not any(name.endswith("token") for name in options)


def test_checkpoints_of_a_run_that_is_written_over_are_removed(tmp_path, monkeypatch):
    out = tmp_path / "out"
    for name in ("checkpoint-2", "checkpoint-9"):
        (out / name).mkdir(parents=True)
        (out / name / "trainer_state.json").write_text('{"global_step": 9}')
    (out / "checkpoint-best").mkdir()  # not a trainer's
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("hf_mxfp4.recipes.grpo.prepare_start", Mock(side_effect=KeyboardInterrupt))
        short_run(out, "--overwrite=true")
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-best"}
    # Nobody resumes from the run that was replaced.
    with pytest.raises(SystemExit, match="nothing to resume"):
        short_run(out, "--overwrite=true", "--resume_from_checkpoint=true")


def test_a_run_that_is_resumed_keeps_its_checkpoints_although_it_may_write_over_others(tmp_path):
    out = tmp_path / "out"
    short = ["--overwrite=true", "--study={reload_check: 0}", "--evaluate_n=4", "--save_strategy=steps"]
    short_run(out, *short, "--save_steps=1", "--max_steps=1")
    assert short_run(out, *short, "--max_steps=1", "--resume_from_checkpoint=true")["steps"] == 1
    assert last_complete_checkpoint(out) == str(out / "checkpoint-1")


@pytest.mark.parametrize("recipe", [grpo, sft, distill], ids=["grpo", "sft", "distill"])
def test_two_runs_do_not_write_into_one_folder(recipe, tmp_path, monkeypatch):
    started = []

    def start_another(*arguments):
        monkeypatch.undo()
        with pytest.raises(SystemExit, match="another process is at work in .*out, .*; wait for its end"):
            recipe.main(words)
        started.append(True)
        raise KeyboardInterrupt

    words = [f"--output_dir={tmp_path / 'out'}", "--overwrite=true"]
    monkeypatch.setattr("hf_mxfp4.recipes.tasks.TaskArguments.load_task", start_another)
    with pytest.raises(KeyboardInterrupt):
        recipe.main(words)
    assert started == [True]


def test_what_the_trainer_refuses_ends_with_a_message(tmp_path):
    with pytest.raises(
        SystemExit, match="error: .*nope not found .* The layers for --lora_target_modules are down_proj"
    ):
        short_run(tmp_path / "out", "--use_peft=true", "--lora_target_modules=nope", "--study={sft_steps: 0}")


FULL = OSError(errno.ENOSPC, "No space left on device")
TORCH = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 61760 vs 61648")


@pytest.mark.parametrize("error", [FULL, TORCH], ids=["system", "torch"])
def test_a_full_disk_ends_with_a_message(error, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.recipes.grpo.load_policy", Mock(side_effect=error))
    with pytest.raises(SystemExit, match="^error: the disk of .*out is full; free .* --resume_from_checkpoint true$"):
        short_run(tmp_path / "out", "--study={sft_steps: 0}")


def test_an_error_that_is_not_expected_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.recipes.grpo.load_policy", Mock(side_effect=RuntimeError("a mistake of ours")))
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        short_run(tmp_path / "out", "--study={sft_steps: 0}")


def test_a_saved_policy_is_not_trained_under_another_scheme(whole, tmp_path):
    short = [
        f"--model_name_or_path={whole[0] / 'policy'}",
        "--max_steps=1",
        "--evaluate_n=4",
        "--study={reload_check: 0}",
    ]
    with pytest.raises(SystemExit, match=r"another scheme: preset=w4a8 \(not w4a16\); .* leave out .*preset"):
        short_run(tmp_path / "second", *short, "--preset=w4a16")
    assert short_run(tmp_path / "third", *short)["n_quantized"] == 14
    full = short_run(tmp_path / "fourth", *short, "--full_precision=true", "--aqn=false")
    assert full["scheme"] == "full precision"
    assert full["n_quantized"] == 0
    saved = json.loads((tmp_path / "fourth" / "policy" / "config.json").read_text())
    assert saved.get("quantization_config") is None
