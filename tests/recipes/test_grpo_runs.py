# SPDX-License-Identifier: Apache-2.0
"""The recipe on a mixture of experts, stopped and resumed, and in two processes (DDP over gloo); with LoRA on a packed
base, up to the adapter loaded onto a fresh base; and the evaluation before RL where FSDP or DeepSpeed leave the model
on the CPU."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from unittest.mock import MagicMock, Mock

import processes
import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from same_bits import tensors_in
from test_grpo import CONFIGS, REPORTED, ROOT, TINY, logged, short_run
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from undrawn import leave_figures_undrawn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.recipes.evaluation import generate
from hf_mxfp4.recipes.post_training import evaluation
from hf_mxfp4.recipes.post_training.arguments import parse
from hf_mxfp4.recipes.post_training.policy import find_start


pytestmark = pytest.mark.usefixtures("blank_pictures")
HERE = Path(__file__).resolve().parent
SHORT = ("--save_strategy=steps", "--save_steps=3")
PACKED = MXFP4RLConfig(mode="packed")


def lora_run(folder, *options):
    return short_run(folder, "--lora_r=2", *options, config="tiny_cpu_lora")


def history_of(folder):
    return json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]


def test_a_mixture_of_experts(tmp_path):
    summary = short_run(tmp_path, "--overwrite", *SHORT, config="tiny_moe_cpu")
    assert summary["steps"] == 3 and summary["n_quantized"] >= 8  # the attention's; experts where they are quantized
    assert summary["model"] == "qwen3_moe made for this run (2 layers, width 32)"
    assert summary["reloaded"] == {"compared": 16, "identical": 16}
    assert [entry["router_replay/coverage"] for entry in history_of(tmp_path) if "loss" in entry] == [1.0] * 3
    config = AutoConfig.from_pretrained(tmp_path / "policy")
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == ("qwen3_moe", 8, 2)


def test_routed_experts_alone_with_mxfp8_inputs(tmp_path):
    summary = short_run(tmp_path, "--overwrite", config="k3_moe")
    assert summary["steps"] == 3 and summary["n_quantized"] == 2 * 8 * 2  # two projections of eight experts, two layers
    assert summary["reloaded"] == {"compared": 16, "identical": 16}
    config = AutoConfig.from_pretrained(tmp_path / "policy").quantization_config
    assert str(MXFP4RLConfig.from_dict(config).activation_scheme) == "mxfp8"


CHECKPOINTS = ("--save_strategy=steps", "--save_steps=1", "--num_iterations=2", REPORTED)


@pytest.mark.slow
def test_a_resumed_recipe_ends_with_the_same_policy(tmp_path, capsys):
    out = tmp_path / "out"
    short_run(out, *CHECKPOINTS)
    policy = (out / "policy" / "model.safetensors").read_bytes()
    # As a process leaves it that is killed while it writes the second checkpoint.
    shutil.rmtree(out / "checkpoint-3")
    shutil.rmtree(out / "policy")
    for name in ("trainer_state.json", "mxfp4_manifest.json"):
        (out / "checkpoint-2" / name).unlink()
    weights: Path = out / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    resumed = short_run(out, "--overwrite=false", "--resume_from_checkpoint=true", *CHECKPOINTS)
    assert resumed["steps"] == 3
    assert [line["step"] for line in logged(out, "start")] == [0, 1]
    assert resumed["accuracy_before"]["exact_match"] >= 0
    assert (out / "policy" / "model.safetensors").read_bytes() == policy
    assert "checkpoint-2 is not resumed from: it has no trainer_state.json" in capsys.readouterr().err


def test_an_evaluation_that_a_stop_cut_short_is_made_when_the_run_goes_on(tmp_path, monkeypatch):
    out = tmp_path / "out"
    evaluate = evaluation.evaluate_greedy
    options = (
        *SHORT,
        "--evaluate_every=2",
        "--study={evaluate_before: false}",
        "--study={reload_check: 0}",
        "--study={save_policy: false}",
    )

    def stop(*arguments, title, **named):
        if title == "evaluating":
            raise KeyboardInterrupt
        return evaluate(*arguments, title=title, **named)

    monkeypatch.setattr(evaluation, "evaluate_greedy", stop)
    with pytest.raises(KeyboardInterrupt):
        short_run(out, *options)
    monkeypatch.undo()
    assert short_run(out, "--overwrite=false", "--resume_from_checkpoint=true", *options)["steps"] == 3
    assert [entry["step"] for entry in history_of(out) if "greedy/exact_match" in entry] == [2]


def launch(folder, ranks, *options):
    words = [*TINY, "--evaluate_n=13", f"--output_dir={folder}", *options]
    job = processes.script(HERE / "run_and_leave.py", ROOT / "recipes" / "grpo.py", *words)
    done = processes.run(job, ranks=ranks, timeout=180)
    assert done.returncode == 0, done.output[-3000:]
    assert done.output.count("left properly") == ranks, done.output[-3000:]
    return json.loads((folder / "summary.json").read_text())


def test_two_processes_train_evaluate_save_and_reload(tmp_path):
    summary = launch(tmp_path / "out", 2, REPORTED, *SHORT)
    assert summary["n_quantized"] == 14
    assert summary["steps"] == 3
    assert summary["reloaded"] == {"compared": 13, "identical": 13}
    # Thirteen problems do not divide by two, and each has its completion.
    lines = (tmp_path / "out" / "completions_after.jsonl").read_text().splitlines()
    assert len({json.loads(line)["prompt"] for line in lines}) == 13
    history = history_of(tmp_path / "out")
    noisy = [entry for entry in history if entry.get("aqn/sigma")]
    assert [entry["aqn/n_modules"] for entry in noisy] == [5, 5]
    for metric in ("error/grid", "error/sqnr_db"):
        assert any(isinstance(entry.get(metric), float) for entry in history), metric
    assert (tmp_path / "out" / "run_report.html").is_file()
    assert all(0.7 < entry["aqn/measured_std"] / entry["aqn/sigma"] < 1.3 for entry in noisy)


def test_a_reloaded_policy_is_compared_in_the_batches_of_two_processes(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(generate, "PartialState", lambda: Mock(num_processes=2, is_main_process=True))
    monkeypatch.setattr(generate, "complete_batches", lambda *arguments, **named: done.append(arguments[4]) or [])
    monkeypatch.setattr(evaluation, "AutoTokenizer", Mock())
    trainer = MagicMock()
    recipe = Mock(study=Mock(rollout_scheme=None, greedy_batch_size=4, reload_check=3))
    trainer.accelerator.num_processes = 2
    task = Mock(test=Dataset.from_dict({"prompt": [str(i) for i in range(30)]}), scores={})
    evaluate = evaluation.PolicyEvaluation(trainer, task, recipe)
    after = evaluate("after")
    found = evaluate.compare_reloaded(tmp_path, Mock(), after)
    whole, part = done
    assert found["compared"] == 8
    assert part == whole[:2]
    assert [batch.rows for batch in part] == [(0, 2, 4, 6), (1, 3, 5, 7)]


GPU = torch.device("cuda:0")


class Model(nn.Linear):
    """A small layer; where it was moved is noted instead of done."""

    def __init__(self):
        super().__init__(10, 10, bias=False)
        self.moves = []

    def to(self, device):
        self.moves.append(torch.device(device).type)
        return self


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)


@pytest.mark.parametrize(
    ("error", "ending", "message"),
    [
        (KeyError, KeyError, None),
        (torch.OutOfMemoryError, SystemExit, "does not fit on cuda:0, .* --study .{evaluate_before: false}"),
    ],
)
def test_a_model_is_moved_there_and_back_and_one_that_does_not_fit_ends_with_a_message(error, ending, message):
    model = Model()
    with pytest.raises(ending, match=message), evaluation.placed(model, GPU):
        assert model.moves == ["cuda"]
        raise error
    assert model.moves == ["cuda", "cpu"]


def test_sharded_and_placed_models_stay():
    partitioned = Model()
    partitioned.weight.ds_id = 3  # as DeepSpeed marks it
    for model, device in ((partitioned, GPU), (Model(), torch.device("cpu"))):
        with evaluation.placed(model, device):
            pass
        assert model.moves == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on a packed base: its folder, its summary, and what it printed."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        leave_figures_undrawn(patch.setattr)
        return folder, lora_run(folder), printed.getvalue()


def test_the_whole_recipe_on_a_packed_base(whole):
    folder, summary, table = whole
    assert summary["n_quantized"] == 14
    assert summary["n_skipped"] == 1
    assert summary["steps"] == 3
    assert summary["scheme"] == PACKED.describe()
    assert summary["adapter"]
    assert summary["reloaded"] == {"compared": 16, "identical": 16}
    assert json.loads((folder / "summary.json").read_text()) == summary

    # Packed one by one, weights cannot be smoothed as they are loaded.
    assert summary["model"].endswith(", smoothed at 8 places")
    # The start is a full-precision checkpoint; what was trained is an adapter that knows the scheme of its base.
    assert "quantization_config" not in json.loads((folder / "base" / "config.json").read_text())
    adapter = json.loads((folder / "policy" / "adapter_config.json").read_text())
    assert MXFP4RLConfig.from_dict(adapter["base_quantization"]) == PACKED
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (2, 32, 0.0)
    for text in ("16 of 16 completions identical", "adapter alone"):
        assert text in table


def test_a_packed_checkpoint_as_the_start(whole, tmp_path):
    base = whole[0] / "base"
    AutoModelForCausalLM.from_pretrained(base, quantization_config=PACKED).save_pretrained(tmp_path / "packed")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "packed")
    start = f"--model_name_or_path={tmp_path / 'packed'}"
    summary = lora_run(tmp_path / "second", start)
    assert summary["n_quantized"] == 14
    assert summary["reloaded"]["identical"] == 16
    with pytest.raises(SystemExit, match=r"saved with another scheme: preset=w4a16 \(not w4a4\)"):
        lora_run(tmp_path / "third", start, "--preset=w4a4")


def distance(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.large), ["--use_peft=false"]])
def test_an_adapter_as_the_start_is_trained_further(whole, tmp_path, options):
    """A step without a learning rate leaves the adapter as it was: it is that one, and no fresh one."""
    start = tmp_path / "start"
    shutil.copytree(whole[0] / "policy", start)
    torch.manual_seed(1)
    weights = {name: 0.1 * torch.randn_like(tensor) for name, tensor in tensors_in(start).items()}
    save_file(weights, start / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "rewards.py").write_text("def length(completions, **kwargs): return [len(c) for c in completions]")
    short = [f"--model_name_or_path={start}", f"--reward={tmp_path}/rewards.py:length", "--max_steps=1", *options]
    lora_run(tmp_path / "still", *short, "--learning_rate=0", "--study={reload_check: 0}")
    assert distance(weights, tensors_in(tmp_path / "still" / "policy")) == 0
    moved = lora_run(tmp_path / "moved", *short, "--warmup_steps=0", "--learning_rate=1e-3")
    assert 0 < distance(weights, tensors_in(tmp_path / "moved" / "policy")) < 0.01
    assert moved["reloaded"] == {"compared": 16, "identical": 16}
    assert moved["adapter"]
    assert moved["n_quantized"] == 14
    assert moved["scheme"] == PACKED.describe()
    saved = json.loads((tmp_path / "moved" / "policy" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(whole[0] / "prepared")
    assert saved["r"] == 2


def test_the_start_says_which_scheme_and_adapter_options_it_has(whole, tmp_path):
    adapter = f"--model_name_or_path={whole[0] / 'policy'}"
    on_the_cpu = ["--use_cpu=true", "--bf16=false", f"--output_dir={tmp_path}"]
    stored, options = find_start(parse([adapter, *on_the_cpu]))
    assert stored.adapter
    assert options.quantization == PACKED
    assert stored.weights == str(whole[0] / "prepared")
    lora = ["--config", str(CONFIGS / "tiny_cpu_lora.yaml"), adapter]
    with pytest.raises(SystemExit, match="has r=2, not lora_r=16; leave lora_r out, or start from its base"):
        find_start(parse(lora))
    with pytest.raises(SystemExit, match=r"another scheme: preset=w4a16 \(not w4a8\); .* leave out .*preset"):
        find_start(parse([*lora, "--lora_r=2", "--preset=w4a8"]))
    (whole[0] / "policy" / "adapter_config.json").rename(tmp_path / "away")
    try:
        with pytest.raises(SystemExit, match="cannot load the model"):
            find_start(parse([adapter, *on_the_cpu]))
    finally:
        (tmp_path / "away").rename(whole[0] / "policy" / "adapter_config.json")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--use_peft=false", "error: mode='packed' freezes the weights; .* --use_peft true, or use mode='qat'"),
        ("--use_dora=true", "error: use_dora needs full-precision weights"),
    ],
)
def test_what_cannot_train_on_packed_weights_ends_before_anything_is_made(option, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        lora_run(tmp_path / "out", option)
    assert not (tmp_path / "out").exists()
