# SPDX-License-Identifier: Apache-2.0
"""Exported checkpoints in plain transformers with compressed-tensors, in a process that cannot import this package;
and the memory that an export needs."""

import json
import os
import subprocess
import sys

import pytest
import torch
from export_files import save_packed, save_plain
from peft import LoraConfig, get_peft_model
from processes import code, run
from same_bits import IDS
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4.checkpoint import export, import_checkpoint


pytest.importorskip("compressed_tensors")

WAY = ["as it is"]
#: Attention, shared experts and dense MLPs, by the pattern of recipes/configs/k3_moe.yaml.
ALL_BUT_EXPERTS = r"re:(?!.*\.experts\b).*"
MODELS = {
    "qwen2-biases-tied": {"family": "qwen2", "tie": True},
    "qwen3_moe-attention": {"family": "qwen3_moe", "config": {"modules_to_not_convert": ["experts"]}},
    "qwen2_moe-experts": {"family": "qwen2_moe", "config": {"modules_to_not_convert": [ALL_BUT_EXPERTS]}},
    "llama-odd-length": {"family": "llama", "intermediate": 80},
}
#: Exported from plain checkpoints, with the rule of the scales.
PLAIN = {"plain-rceil": ("qwen2", "rceil"), "plain-experts": ("qwen3_moe", "even")}
MANTISSAS = {"macro_block": 128, "macro_search": "block_mantissas"}
#: With their experts quantized; gpt-oss is in tests/recipes/test_gpt_oss.py.
MIXTURES = ["qwen3_moe", "qwen2_moe", "mixtral"]
#: Each folder is loaded in the given ways: as it is, and dequantized by the format's own config.
LOADER = """
import json, sys
sys.modules["hf_mxfp4"] = None  # importing it is an error
sys.modules["torchao"] = None  # transformers would import it, for seconds
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
found = {}
for name, ways in json.loads(sys.argv[1]).items():
    for way in ways:
        options = {} if way == "as it is" else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
        model, info = AutoModelForCausalLM.from_pretrained(f"out-{name}", output_loading_info=True, **options)
        assert not any(info.values()), (name, way, info)
        found[name, way] = model(torch.arange(2, 14).view(2, 6)).logits.detach()
torch.save(found, "logits.pt")
for own in ("policy", "imported"):  # a trained and a packed checkpoint of this package
    try:
        AutoModelForCausalLM.from_pretrained(own)
    except ValueError as error:
        print(error)
"""


def train(model, parameters, lr: float):
    """Two steps that change many codes."""
    optimizer = torch.optim.SGD(parameters, lr=lr)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained_policy(folder):
    """Save masters that were trained, other parameters as they are in bfloat16, and return what they compute in it."""
    config = hf_mxfp4.MXFP4RLConfig(preset="w4a16", outlier_fallback=None, **MANTISSAS)
    base = save_plain(folder.with_name("base"))
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    before = codes_of(policy)
    train(policy, [module.weight for module in policy.modules() if isinstance(module, hf_mxfp4.MXFP4Linear)], 8.0)
    policy.save_pretrained(folder)
    assert not torch.equal(codes_of(policy), before)
    in_float32 = policy(IDS).logits
    for parameter in hf_mxfp4.pack(policy).parameters():  # not the frequencies of rotary embeddings
        parameter.data = parameter.data.to(torch.bfloat16) if parameter.is_floating_point() else parameter.data
    logits = policy(IDS).logits
    assert (logits - in_float32).norm() < 0.02 * in_float32.norm()
    return logits


def merged_adapters(folder, imported):
    """Save an imported checkpoint with trained adapters merged into it, and return what it computes."""
    model = AutoModelForCausalLM.from_pretrained(imported, dtype=torch.bfloat16)
    before = codes_of(model)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=64, target_modules="all-linear"))
    train(adapted, [parameter for parameter in adapted.parameters() if parameter.requires_grad], 8.0)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(folder)
    assert not torch.equal(codes_of(merged), before)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(IDS).logits


def codes_of(model) -> torch.Tensor:
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    return layer.weight.clone() if layer.weight.dtype == torch.uint8 else layer.effective_weight(layer.weight).detach()


@pytest.mark.slow
def test_logits_are_ours(tmp_path):
    expected = {}
    ways = {}
    for name, options in MODELS.items():
        folder = save_packed(tmp_path / name, **options)
        export(folder, tmp_path / f"out-{name}", "compressed-tensors", "dequantize")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        expected[name] = model(IDS).logits
        ways[name] = WAY
    for name, (family, rule) in PLAIN.items():
        folder = save_plain(tmp_path / name, family)
        export(folder, tmp_path / f"out-{name}", "compressed-tensors", scale_rule=rule)
        config = hf_mxfp4.MXFP4RLConfig(mode="packed", preset="w4a16", scale_rule=rule, macro_block=None)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
        expected[name] = model(IDS).logits
        ways[name] = WAY
    # transformers loads experts in NVFP4 wrongly, see test_nvfp4.py.
    config = {"preset": "w4a16", "modules_to_not_convert": ["experts"], **MANTISSAS}
    folder = save_packed(tmp_path / "nvfp4", "qwen3_moe", config=config)
    assert not export(folder, tmp_path / "out-nvfp4", "nvfp4").changed
    expected["nvfp4"], ways["nvfp4"] = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, WAY
    expected["policy"], ways["policy"] = trained_policy(tmp_path / "policy"), WAY
    export(tmp_path / "policy", tmp_path / "out-policy", "nvfp4")
    import_checkpoint(tmp_path / "out-policy", tmp_path / "imported")
    expected["merged"], ways["merged"] = merged_adapters(tmp_path / "merged", tmp_path / "imported"), WAY
    export(tmp_path / "merged", tmp_path / "out-merged", "nvfp4")
    assert (expected["policy"] - expected["merged"]).abs().max() > 2**-3 * expected["merged"].abs().max()
    for family in MIXTURES:
        folder = save_packed(tmp_path / family, family)
        export(folder, tmp_path / f"out-{family}", "compressed-tensors")
        expected[family] = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
        ways[family] = [*WAY, "dequantized"]
    # A new process, in which nothing of this package has been imported.
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOADER, json.dumps(ways)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hf-mxfp4 run -- COMMAND") == 2
    found = torch.load(tmp_path / "logits.pt")
    assert len(found) == 4 + 2 + 3 + 2 * 3
    for (name, way), logits in found.items():
        assert logits.dtype == torch.bfloat16
        # Other products of the same weights, whose sums round some numbers of bfloat16 to a neighbour.
        tolerance = 2**-7 * float(expected[name].detach().abs().max())
        torch.testing.assert_close(logits, expected[name], rtol=0, atol=tolerance, msg=f"{name}, {way}")


CONVERSION = """
import sys
from hf_mxfp4.checkpoint import export, folder

folder.MAX_SHARD_SIZE = "5MB"

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))

export("small", "small-out", "compressed-tensors")
before = peak()
export("large", "large-out", "compressed-tensors")
print("grew", peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_converting_holds_one_layer_and_one_shard(tmp_path):
    sizes = {"hidden": 512, "intermediate": 2048, "dtype": torch.bfloat16}
    make_model("llama", layers=2, **sizes).save_pretrained(tmp_path / "small")
    large = make_model("llama", layers=14, **sizes)
    large.save_pretrained(tmp_path / "large")
    done = run(code(CONVERSION), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    grew = int(done.stdout.split()[-1])
    assert large.get_memory_footprint() > 100e6 and grew < 85e6, grew  # allocators keep what was freed
