# SPDX-License-Identifier: Apache-2.0
"""The recipe with LoRA on a packed base, from a model made on the spot to the adapter loaded onto a fresh base."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_grpo import TINY
from undrawn import leave_figures_undrawn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.recipes.grpo import main
from hf_mxfp4.recipes.post_training.arguments import parse
from hf_mxfp4.recipes.post_training.policy import find_start


pytestmark = pytest.mark.usefixtures("blank_pictures")
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "configs"
PACKED = MXFP4RLConfig(mode="packed")


def short_run(folder, *options):
    config = ["--config", str(CONFIGS / "tiny_cpu_lora.yaml"), "--lora_r=2", "--n_test=16"]
    return main([*config, *TINY, f"--output_dir={folder}", *options])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on a packed base: its folder, its summary, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("whole") / "out", io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        leave_figures_undrawn(patch.setattr)
        return folder, short_run(folder), printed.getvalue()


def test_the_whole_recipe_on_a_packed_base(whole):
    folder, summary, table = whole
    assert summary["n_quantized"] == 14 and summary["n_skipped"] == 1 and summary["steps"] == 3
    assert summary["scheme"] == PACKED.describe() and summary["adapter"]
    assert summary["reloaded"] == {"compared": 16, "identical": 16}
    assert json.loads((folder / "summary.json").read_text()) == summary

    # The start is a full-precision checkpoint; what was trained is an adapter that knows the scheme of its base.
    assert "quantization_config" not in json.loads((folder / "base" / "config.json").read_text())
    adapter = json.loads((folder / "policy" / "adapter_config.json").read_text())
    assert MXFP4RLConfig.from_dict(adapter["base_quantization"]) == PACKED
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (2, 32, 0.0)
    for text in ("16 of 16 completions identical", "adapter alone"):
        assert text in table


def adapter_weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def distance(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.large), ["--use_peft=false"]])
def test_an_adapter_as_the_start_is_trained_further(whole, tmp_path, options):
    """A step without a learning rate leaves the adapter as it was: it is that one, and no fresh one."""
    start = tmp_path / "start"
    shutil.copytree(whole[0] / "policy", start)
    torch.manual_seed(1)
    weights = {name: 0.1 * torch.randn_like(tensor) for name, tensor in adapter_weights(start).items()}
    save_file(weights, start / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "rewards.py").write_text("def length(completions, **kwargs): return [len(c) for c in completions]")
    short = [f"--model_name_or_path={start}", f"--reward={tmp_path}/rewards.py:length", "--max_steps=1", *options]
    short_run(tmp_path / "still", *short, "--learning_rate=0", "--reload_check=0")
    assert distance(weights, adapter_weights(tmp_path / "still" / "policy")) == 0
    moved = short_run(tmp_path / "moved", *short, "--warmup_steps=0", "--learning_rate=1e-3")
    assert 0 < distance(weights, adapter_weights(tmp_path / "moved" / "policy")) < 0.01
    assert moved["reloaded"] == {"compared": 16, "identical": 16} and moved["adapter"]
    assert moved["n_quantized"] == 14 and moved["scheme"] == PACKED.describe()
    saved = json.loads((tmp_path / "moved" / "policy" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(whole[0] / "base") and saved["r"] == 2


def test_the_start_says_which_scheme_and_adapter_options_it_has(whole, tmp_path):
    adapter = f"--model_name_or_path={whole[0] / 'policy'}"
    on_the_cpu = ["--use_cpu=true", "--bf16=false", f"--output_dir={tmp_path}"]
    start = find_start(parse([adapter, *on_the_cpu]))
    assert start.is_adapter and start.scheme == PACKED and start.stored.weights == str(whole[0] / "base")
    lora = ["--config", str(CONFIGS / "tiny_cpu_lora.yaml"), adapter]
    with pytest.raises(SystemExit, match="has r=2, not lora_r=16; leave lora_r out, or start from its base"):
        find_start(parse(lora))
    with pytest.raises(SystemExit, match=r"another scheme: preset=w4a16 \(not w4a4\); .* leave out .*preset"):
        find_start(parse([*lora, "--lora_r=2", "--preset=w4a4"]))
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
        short_run(tmp_path / "out", option)
    assert not (tmp_path / "out").exists()
