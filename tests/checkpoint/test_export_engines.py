# SPDX-License-Identifier: Apache-2.0
"""Exported checkpoints in plain transformers with compressed-tensors, in a process that cannot import this package."""

import os
import subprocess
import sys

import pytest
import torch
from export_files import save_packed, save_plain
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4.checkpoint import export


pytest.importorskip("compressed_tensors")

IDS = torch.arange(2, 14).view(2, 6)
#: Exported from plain checkpoints, with the rule of the scales.
PLAIN = {"plain-llama": ("llama", "even"), "plain-rceil": ("qwen2", "rceil"), "plain-experts": ("qwen3_moe", "even")}
MODELS = {
    "qwen2-biases-tied": {"family": "qwen2", "tie": True},
    "qwen2-float32": {"family": "qwen2", "dtype": torch.float32},
    "llama": {"family": "llama"},
    "qwen3_moe-attention": {"family": "qwen3_moe", "config": {"modules_to_not_convert": ["experts"]}},
    "llama-requantized": {"family": "llama", "config": {"macro_block": 128, "outlier_fallback": 0.5}},
    "llama-odd-length": {"family": "llama", "intermediate": 80},
}
LOADER = """
import sys
sys.modules["hf_mxfp4"] = None  # importing it is an error
sys.modules["torchao"] = None  # transformers would import it, for seconds
import torch
from transformers import AutoModelForCausalLM
found = {}
for name in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(f"out-{name}", output_loading_info=True)
    assert not any(info.values()), (name, info)
    found[name] = model(torch.arange(2, 14).view(2, 6)).logits.detach()
torch.save(found, "logits.pt")
"""


@pytest.mark.slow
def test_logits_are_ours_bit_for_bit(tmp_path):
    expected = {}
    for name, options in MODELS.items():
        folder = save_packed(tmp_path / name, **options)
        export(folder, tmp_path / f"out-{name}", "compressed-tensors", "requantize")
        if "requantized" in name:
            model = AutoModelForCausalLM.from_pretrained(folder)
            for layer in [m for m in model.modules() if hasattr(m, "dequantized_weight")]:
                values = layer.dequantized_weight(torch.float32)
                plain = hf_mxfp4.quantize(values, scale_rule=layer.config.scale_rule).dequantize(torch.bfloat16)
                # A stand-in for the layer, so that nothing of the exporter is used.
                layer.forward = lambda x, w=plain, b=layer.bias: torch.nn.functional.linear(x, w, b)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        expected[name] = model(IDS).logits
    for name, (family, rule) in PLAIN.items():
        folder = save_plain(tmp_path / name, family)
        export(folder, tmp_path / f"out-{name}", "compressed-tensors", scale_rule=rule)
        config = hf_mxfp4.MXFP4RLConfig(mode="packed", preset="w4a16", scale_rule=rule, macro_block=None)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
        expected[name] = model(IDS).logits
    # A new process, in which nothing of this package has been imported.
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *expected], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt")
    for name in expected:
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], expected[name]), name


def test_compressed_tensors_reads_the_config_as_it_is_meant(tmp_path):
    from compressed_tensors.quantization import QuantizationConfig
    from export_files import config_in

    source = save_packed(tmp_path / "packed", layers=1)
    export(source, tmp_path / "out", "compressed-tensors")
    config = QuantizationConfig.model_validate(config_in(tmp_path / "out")["quantization_config"])
    (scheme,) = config.config_groups.values()
    assert (config.format, config.quantization_status.value) == ("mxfp4-pack-quantized", "compressed")
    assert (scheme.weights.num_bits, scheme.weights.group_size, scheme.weights.dynamic) == (4, 32, False)
    assert scheme.input_activations is None and config.ignore == ["lm_head"]
