# SPDX-License-Identifier: Apache-2.0
"""Exported checkpoints in vLLM, in a process that cannot import this package, against transformers."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import harness
import pytest
import serving
import torch
from harness import model_logprobs, tiny_model
from transformers import AutoModelForCausalLM
from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel, init_nvfp4_linear_kernel

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.checkpoint import export, pack_checkpoint


pytestmark = pytest.mark.vllm

HERE = Path(__file__).resolve().parent
FAMILIES = ("qwen2", "qwen3", *harness.EXPERTS)
#: Policies whose exports are served.
TRAINED = {scheme: f"policy in {scheme}" for scheme in serving.SCHEMES}
EXPERTS_ALONE = {"modules_to_not_convert": ["experts", "lm_head"]}
#: Only experts of gpt-oss are quantized in its own format.
ATTENTION_ALONE = {"modules_to_not_convert": ["self_attn", "lm_head"]}
MANTISSAS = {"scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas"}
EVEN = {"scale_rule": "even", "macro_block": None}
CT = ("compressed-tensors", {})
QUARK = ("quark", {})
NVFP4 = ("nvfp4", {})
#: What is exported: family, format, options of the export; and what of vLLM reads it.
ROWS = {
    "bf16": ("qwen2", "bf16", {}, "UnquantizedLinearMethod"),
    "compressed-tensors": ("qwen2", *CT, "CompressedTensorsW4A4Mxfp4"),
    "compressed-tensors, Qwen3": ("qwen3", *CT, "CompressedTensorsW4A4Mxfp4"),
    "nvfp4": ("qwen2", *NVFP4, "CompressedTensorsW4A4Fp4"),
    "nvfp4, w4a8": (TRAINED["w4a8"], *NVFP4, "CompressedTensorsW4A4Fp4"),
    "nvfp4, w4a16": (TRAINED["w4a16"], *NVFP4, "CompressedTensorsW4A4Fp4"),
    **{
        f"bf16, {scheme}": (TRAINED[scheme], "bf16", {}, "UnquantizedLinearMethod")
        for scheme in serving.SCHEMES
        if serving.cell(scheme, "bf16") != serving.REFUSED
    },
    "nvfp4-modelopt": ("qwen2", "nvfp4-modelopt", {}, "ModelOptLinearMethod"),
    "quark": ("qwen2", *QUARK, "QuarkOCP_MX"),
    "quark w4a4": ("qwen2", "quark", {"preset": "w4a4"}, "QuarkOCP_MX"),
    "bf16 experts": ("qwen3_moe", "bf16", {}, "UnquantizedFusedMoEMethod"),
    "compressed-tensors experts": ("qwen3_moe", *CT, "CompressedTensorsW4A4Mxfp4MoEMethod"),
    "experts left alone": ("qwen3_moe", "compressed-tensors", EXPERTS_ALONE, "UnquantizedFusedMoEMethod"),
    "compressed-tensors experts, Mixtral": ("mixtral", *CT, "CompressedTensorsW4A4Mxfp4MoEMethod"),
    "nvfp4 experts": ("qwen3_moe", *NVFP4, "CompressedTensorsW4A4Nvfp4MoEMethod"),
    "nvfp4 experts, Mixtral": ("mixtral", *NVFP4, "CompressedTensorsW4A4Nvfp4MoEMethod"),
    "nvfp4-modelopt experts": ("qwen3_moe", "nvfp4-modelopt", {}, "ModelOptNvFp4FusedMoE"),
    "quark experts": ("qwen3_moe", *QUARK, "QuarkOCP_MX_MoEMethod"),
    "quark w4a4 experts": ("qwen3_moe", "quark", {"preset": "w4a4"}, "QuarkOCP_MX_MoEMethod"),
    "quark experts, Mixtral": ("mixtral", *QUARK, "QuarkOCP_MX_MoEMethod"),
    "gpt-oss": ("gpt_oss", "gpt-oss", ATTENTION_ALONE, "GptOssMxfp4MoEMethod"),
    "bf16, gpt-oss": ("gpt_oss", "bf16", ATTENTION_ALONE, "UnquantizedFusedMoEMethod"),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Plain checkpoints, whose values bfloat16 holds, and a policy that was trained: formats store what they do not
    quantize in bfloat16."""
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, **harness.MODELS.get(family, ("", {}))[1]).bfloat16().save_pretrained(folders[family])
    for scheme, name in TRAINED.items():
        folders[name] = tmp_path_factory.mktemp("policy")
        serving.save_policy(folders["qwen2"], folders[name], scheme)
    return folders


def set_plain_linear(policy, name: str) -> None:
    """Replace a layer by one that multiplies with its quantized weight in bfloat16."""
    layer = policy.get_submodule(name)
    plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight.data = layer.effective_weight(layer.weight).detach().bfloat16().float()
    plain.bias = layer.bias
    policy.set_submodule(name, plain)


@pytest.fixture(scope="module")
def served(bases, tmp_path_factory):
    """What vLLM says of each row, all from one process."""
    root = tmp_path_factory.mktemp("exports")
    folders = {name: root / str(index) for index, name in enumerate(ROWS)}
    for name, (family, format, options, _) in ROWS.items():
        export(bases[family], folders[name], format, **options)
    command = [sys.executable, str(HERE / "serve_alone.py"), str(root / "found.json"), *map(str, folders.values())]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "VLLM_PLUGINS": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = json.loads((root / "found.json").read_text())
    return {name: found[str(folder)] for name, folder in folders.items()}


@pytest.mark.parametrize("name", ROWS)
def test_vllm_alone_computes_with_the_values_of_the_bf16_export(bases, served, name, tmp_path):
    """bfloat16 holds every value of MXFP4, so that this export is what the others stand for."""
    family, format, options, reader = ROWS[name]
    plain = AutoModelForCausalLM.from_pretrained(bases[family], dtype=torch.float32)
    found = torch.tensor(served[name]["logprobs"])
    assert reader in served[name]["readers"]
    if "preset" in options:
        schemes = [MXFP4RLConfig(mode="packed", preset=preset, **EVEN) for preset in ("w4a4", "w4a16")]
        load = partial(AutoModelForCausalLM.from_pretrained, bases[family], dtype=torch.float32)
        expected, weights_only = (model_logprobs(load(quantization_config=scheme)) for scheme in schemes)
        # An activation at the edge between two values of the grid falls to either side in two orders of summation.
        assert (found - expected).abs().median() < 0.02 * (weights_only - expected).abs().median()
        return
    if family in TRAINED.values():
        # Weights alone: inputs have 16 bits, whatever the policy does to them.
        for layer in [name for name, module in plain.named_modules() if isinstance(module, MXFP4Linear)]:
            set_plain_linear(plain, layer)
        assert (found - model_logprobs(plain)).abs().max() < 1e-4
        return
    if format.startswith("nvfp4"):
        config = MXFP4RLConfig(mode="packed", preset="w4a16", **MANTISSAS)
        pack_checkpoint(bases[family], tmp_path / "packed", config)
        export(tmp_path / "packed", tmp_path / "bf16", "bf16")
    else:
        export(bases[family], tmp_path / "bf16", "bf16", **options)
    expected = model_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32))
    assert (found - expected).abs().max() < 1e-4
    assert (expected - model_logprobs(plain)).abs().max() > 0.05  # of which quantization is seen


def test_what_inputs_are_quantized_to(served):
    """Quark says whether; compressed-tensors says that they are not, and vLLM asks for it all the same."""
    inputs = {name: said["inputs"] for name, said in served.items()}
    assert inputs["quark"] == inputs["quark experts"] == ["None"]
    assert len(inputs["quark w4a4"]) == 1
    assert "None" not in inputs["quark w4a4"]
    assert inputs["compressed-tensors"] == inputs["quark w4a4 experts"] == inputs["quark w4a4"]


def test_vllm_has_no_4_bit_kernels_for_cpus():
    """So bf16 is what it serves there without this package."""
    with pytest.raises(ValueError, match="is not supported"):
        init_nvfp4_linear_kernel(use_a16=True)
    with pytest.raises(ValueError, match="Failed to find a kernel"):
        init_mxfp4_linear_kernel()
