# SPDX-License-Identifier: Apache-2.0
"""Packed mixtures of experts in vLLM: codes as they are on disk, and the log-probabilities of the model of
transformers."""

import json

import pytest
import torch
from harness import engine, model_logprobs, served_model, tiny_model, vllm_logprobs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hf_mxfp4 import MXFP4RLConfig


pytestmark = pytest.mark.vllm

FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 128},
    "mixtral": {"intermediate": 128},
    "gpt_oss": {"intermediate": 128},
}
#: Selective fallback ranks the blocks of a whole weight.
SELECTIVE = {"outlier_fallback": 0.5, "outlier_fallback_rate": 0.2, "outlier_fallback_operands": "weights"}
DENSE = {"weights": "dense"}


def packed_folder(tmp_path, family, *, name="packed", seed=0, engine=None, **scheme):
    """A packed checkpoint, its log-probabilities by transformers, and those of the full-precision model."""
    base = tiny_model(family, **FAMILIES[family], seed=seed)
    base.save_pretrained(tmp_path / "base")
    config = MXFP4RLConfig(mode="packed", **scheme)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    folder = tmp_path / name
    model.save_pretrained(folder)
    if engine:
        stored = json.loads((folder / "config.json").read_text())
        stored["quantization_config"]["vllm"] = engine
        (folder / "config.json").write_text(json.dumps(stored))
    return folder, model_logprobs(model), model_logprobs(base)


def expert_layers(llm):
    return [
        m for m in served_model(llm).modules() if type(getattr(m, "quant_method", None)).__name__.endswith("ertsMethod")
    ]


def kinds(llm):
    return {type(layer.quant_method).__name__ for layer in expert_layers(llm)}


def has_the_codes_of(llm, folder):
    """Whether every packed tensor of experts is inside vLLM, bit for bit."""
    found = {}
    for i, layer in enumerate(expert_layers(llm)):
        for own, parameter in layer.named_parameters():
            if not own.endswith("bias"):
                name = own.replace("w13_weight", "gate_up_proj").replace("w2_weight", "down_proj")
                found[f"model.layers.{i}.mlp.experts.{name}"] = parameter.detach()
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name in found}
    assert len(found) >= 8 and all(value.dtype == torch.uint8 for value in tensors.values())
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


def push(llm, tensors):
    """One tensor at a time, by the names of transformers, as TRL does it."""
    for name, tensor in tensors:
        served_model(llm).load_weights([(name, tensor.detach())])


@pytest.mark.parametrize(
    "family, scheme",
    [
        *((family, {}) for family in FAMILIES),
        ("qwen3_moe", {"outlier_fallback": 0.5, "macro_block": "row"}),
        ("gpt_oss", {"outlier_fallback": 0.5, "macro_block": "row"}),
        ("qwen3_moe", {"weight_block": "32x32", "macro_block": 32}),
        ("mixtral", SELECTIVE),
    ],
    ids=str,
)
def test_w4a16_experts_stay_packed(tmp_path, family, scheme):
    folder, expected, unquantized = packed_folder(tmp_path, family, preset="w4a16", **scheme)
    with engine(folder) as llm:
        found, methods, is_as_on_disk = vllm_logprobs(llm), kinds(llm), has_the_codes_of(llm, folder)
    assert methods == {"MXFP4RLExpertsMethod"} and is_as_on_disk
    assert (found - expected).abs().max() < 1e-4
    assert (expected - unquantized).abs().max() > 0.05  # of which quantization is seen


@pytest.mark.parametrize(
    "family, settings", [*((family, None) for family in FAMILIES), ("gpt_oss", DENSE), ("qwen3_moe", DENSE)], ids=str
)
def test_w4a4_experts_have_quantized_inputs(tmp_path, family, settings):
    """Values that fall on an edge of the grid go either way, with the order of a sum."""
    _, other, _ = packed_folder(tmp_path, family, preset="w4a16", name="weights only")
    folder, expected, _ = packed_folder(tmp_path, family, preset="w4a4", engine=settings)
    typical = (other - expected).abs().median()
    with engine(folder) as llm:
        difference, methods = (vllm_logprobs(llm) - expected).abs(), kinds(llm)
    assert methods == {"MXFP4RLExpertsMethod"}
    print(f"{family} {settings}: median {difference.median():.1e}, max {difference.max():.1e}, typical {typical:.1e}")
    assert difference.median() < 0.02 * typical


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_left_alone(tmp_path, family):
    folder, expected, _ = packed_folder(tmp_path, family, modules_to_not_convert=["experts"])
    with engine(folder) as llm:
        names = {type(getattr(m, "quant_method", None)).__name__ for m in served_model(llm).modules()}
        found = vllm_logprobs(llm)
    assert {"UnquantizedFusedMoEMethod", "MXFP4RLLinearMethod"} <= names and "MXFP4RLExpertsMethod" not in names
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_pushed_experts_are_written_in_place(tmp_path, family):
    """Codes as they are, and 16-bit weights quantized as they come, by themselves and through vLLM's reloading."""
    folder, before, _ = packed_folder(tmp_path, family, preset="w4a16")
    second, of_second, _ = packed_folder(tmp_path, family, preset="w4a16", name="second", seed=1)
    plain = tiny_model(family, **FAMILIES[family], seed=2)
    third, of_third, _ = packed_folder(tmp_path, family, preset="w4a16", name="third", seed=2)
    with engine(folder) as llm:
        places = [parameter.data_ptr() for layer in expert_layers(llm) for parameter in layer.parameters()]
        push(llm, load_file(second / "model.safetensors").items())
        assert has_the_codes_of(llm, second)
        assert (vllm_logprobs(llm) - of_second).abs().max() < 1e-4
        push(llm, plain.named_parameters())
        assert has_the_codes_of(llm, third)
        assert (vllm_logprobs(llm) - of_third).abs().max() < 1e-4
        initialize_layerwise_reload(served_model(llm))
        push(llm, load_file(second / "model.safetensors").items())
        finalize_layerwise_reload(served_model(llm), llm.llm_engine.vllm_config.model_config)
        assert has_the_codes_of(llm, second)
        assert places == [parameter.data_ptr() for layer in expert_layers(llm) for parameter in layer.parameters()]
    assert (before - of_second).abs().max() > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_experts_take_what_is_pushed_as_it_is(tmp_path, family):
    folder, of_first, _ = packed_folder(tmp_path, family, preset="w4a16", engine=DENSE)
    second, of_second, _ = packed_folder(tmp_path, family, preset="w4a16", name="second", seed=1)
    plain = tiny_model(family, **FAMILIES[family], seed=2)
    with engine(folder) as llm:
        assert kinds(llm) == {"MXFP4RLDenseExpertsMethod"}
        assert (vllm_logprobs(llm) - of_first).abs().max() < 1e-4
        push(llm, load_file(second / "model.safetensors").items())
        assert (vllm_logprobs(llm) - of_second).abs().max() < 1e-4
        push(llm, plain.named_parameters())
        found = vllm_logprobs(llm)
    assert (found - model_logprobs(plain)).abs().max() < 1e-4


def test_a_checkpoint_that_lacks_scales_is_refused(tmp_path):
    folder, _, _ = packed_folder(tmp_path, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_macro"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj_macro: in no file of the checkpoint"):
        with engine(folder):
            pass
