# SPDX-License-Identifier: Apache-2.0
"""What is pushed into vLLM: codes, weights in full precision, adapters; packed layers are written in place."""

import pytest
import torch
from harness import (
    EXPERTS,
    engine,
    model_logprobs,
    push,
    reload,
    saved_model,
    served_model,
    served_weights,
    values_inside,
    vllm_logprobs,
    with_settings,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from vllm.lora.request import LoRARequest

from hf_mxfp4.integrations.peft import policy_parameters
from hf_mxfp4.ops import matmul_counts, reset_matmul_counts


pytestmark = pytest.mark.vllm

LAYERS = ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def packed(folder, family="qwen2", seed=0, **scheme):
    return saved_model(folder, family, seed, mode="packed", **scheme)


def with_adapters(model, **options):
    """LoRA that changes the model, and what is to be pushed of it."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, **{"target_modules": "all-linear", **options})
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
        if "lora_" in name:
            scale = 3.0 if "lora_B" in name else 1.0
            tensors[name.removeprefix("base_model.model.").replace(".default", "")] = scale * parameter.detach()
    return adapted, tensors


def addresses(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def assert_same_values(inside, model, scheme):
    for name in (f"model.layers.1.{layer}" for layer in LAYERS):
        assert torch.equal(values_inside(inside, name, scheme), model.get_submodule(name).dequantized_weight())


# ---- linear layers --------------------------------------------------------------------------------------------------


def test_codes_full_precision_and_reloading_write_in_place(tmp_path):
    first, _ = packed(tmp_path / "first")
    other, full = packed(tmp_path / "other", seed=1)
    scheme = other.config.quantization_config.weight_scheme
    expected = model_logprobs(other)
    with engine(tmp_path / "first" / "saved") as llm:
        model = served_model(llm)
        before = addresses(model)
        assert_same_values(served_weights(model), first, scheme)
        assert (vllm_logprobs(llm) - expected).abs().max() > 0.05
        changes = (
            lambda: push(model, other.state_dict()),
            lambda: push(model, dict(full.named_parameters())),
            lambda: reload(llm, other.state_dict()),
        )
        for change in changes:
            push(model, first.state_dict())
            change()
            assert_same_values(served_weights(model), other, scheme)
        assert (vllm_logprobs(llm) - expected).abs().max() < 1e-4
        assert addresses(model) == before
        with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight was pushed.*set adapter_rank"):
            push(model, {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 256)})


@pytest.mark.parametrize("preset", ["w4a8", "w4a4"])
def test_pushed_codes_are_multiplied_on_fp8_cores(tmp_path, preset):
    """On CPUs by the same call, if it is asked for. Inputs between two values fall to either side of another sum."""
    scheme = {"preset": preset, "macro_search": "block_mantissas_fp8", "backend": "eager", "matmul_backend": "fp8"}
    packed(tmp_path / "first", **scheme)
    other, full = packed(tmp_path / "other", seed=1, **scheme)
    expected = model_logprobs(other)
    typical = (model_logprobs(other) - model_logprobs(full)).abs().median()
    with engine(tmp_path / "first" / "saved") as llm:
        model = served_model(llm)
        push(model, other.state_dict())
        assert_same_values(served_weights(model), other, other.config.quantization_config.weight_scheme)
        reset_matmul_counts()
        difference = (vllm_logprobs(llm) - expected).abs()
    assert difference.median() < 0.02 * typical, (difference.median(), typical)
    counts = matmul_counts()
    assert counts["fprop"].keys() == {"fp8"}
    assert counts["inexact_elements"] == 0


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_adapters_beside_packed_weights(tmp_path, preset):
    policy, _ = packed(tmp_path, preset=preset)
    plain = model_logprobs(policy)
    saved = policy.state_dict()
    adapted, tensors = with_adapters(policy)
    expected = model_logprobs(adapted)
    assert (expected - plain).abs().max() > 0.05
    with engine(with_settings(tmp_path / "saved", adapter_rank=8)) as llm:
        model = served_model(llm)

        def off(logprobs):
            difference = (vllm_logprobs(llm) - logprobs).abs()  # under w4a4, edges of the grid fall to either side
            return difference.max() if preset == "w4a16" else difference.median()

        before = addresses(model)
        assert off(plain) < 1e-4
        push(model, tensors)
        assert off(expected) < 1e-4
        reload(llm, saved)
        assert off(expected) < 1e-4
        push(model, {name: torch.zeros_like(tensor[:1]) for name, tensor in tensors.items() if "lora_A" in name})
        assert off(plain) < 1e-4
        assert addresses(model) == before
        with pytest.raises(ValueError, match=r"down_proj: an adapter of rank 9 was pushed.* room for rank 8"):
            push(model, {"model.layers.0.mlp.down_proj.lora_A.weight": torch.zeros(9, 512)})


def test_vllms_own_adapters_over_packed_layers(tmp_path):
    policy, _ = packed(tmp_path)
    plain = model_logprobs(policy)
    adapted, _ = with_adapters(policy, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    expected = model_logprobs(adapted)
    with engine(tmp_path / "saved", enable_lora=True, max_lora_rank=8) as llm:
        assert (vllm_logprobs(llm) - plain).abs().max() < 1e-4
        request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        assert (vllm_logprobs(llm, lora_request=request) - expected).abs().max() < 1e-4
    assert (expected - plain).abs().max() > 0.05


def test_adapters_on_experts_and_on_layers_in_full_precision(tmp_path):
    policy, _ = packed(tmp_path, "gpt_oss", preset="w4a16", modules_to_not_convert=["self_attn"])
    adapted, _ = with_adapters(policy, target_modules=["q_proj", "o_proj", "experts"])
    expected = model_logprobs(adapted)
    with engine(with_settings(tmp_path / "saved", weights="dense")) as llm:
        assert (vllm_logprobs(llm) - expected).abs().max() > 0.05
        push(served_model(llm), dict(policy_parameters(adapted)))
        assert (vllm_logprobs(llm) - expected).abs().max() < 1e-4


# ---- and experts ----------------------------------------------------------------------------------------------------


def expert_layers(llm):
    return [m for m in served_model(llm).modules() if "ExpertsMethod" in type(getattr(m, "quant_method", 0)).__name__]


def has_the_codes_of(llm, folder):
    """Whether every packed tensor of experts is inside vLLM, bit for bit."""
    found = {}
    for i, layer in enumerate(expert_layers(llm)):
        for own, parameter in layer.named_parameters():
            if not own.endswith("bias"):
                name = own.replace("w13_weight", "gate_up_proj").replace("w2_weight", "down_proj")
                found[f"model.layers.{i}.mlp.experts.{name}"] = parameter.detach()
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if name in found}
    assert len(found) >= 8
    assert all(value.dtype == torch.uint8 for value in tensors.values())
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_written_in_place(tmp_path, family):
    """Codes as they are, and 16-bit weights quantized as they come, by themselves and through vLLM's reloading."""
    packed(tmp_path / "first", family, preset="w4a16")
    second, plain = packed(tmp_path / "second", family, seed=1, preset="w4a16")
    expected = model_logprobs(second)
    saved = tmp_path / "second" / "saved"
    with engine(tmp_path / "first" / "saved") as llm:
        first = load_file(tmp_path / "first" / "saved" / "model.safetensors")
        places = [parameter.data_ptr() for layer in expert_layers(llm) for parameter in layer.parameters()]
        assert has_the_codes_of(llm, tmp_path / "first" / "saved")
        for tensors in (load_file(saved / "model.safetensors"), dict(plain.named_parameters())):
            push(served_model(llm), first)
            push(served_model(llm), tensors)
            assert has_the_codes_of(llm, saved)
            assert (vllm_logprobs(llm) - expected).abs().max() < 1e-4
        push(served_model(llm), first)
        reload(llm, load_file(saved / "model.safetensors"))
        assert has_the_codes_of(llm, saved)
        assert places == [parameter.data_ptr() for layer in expert_layers(llm) for parameter in layer.parameters()]


@pytest.mark.parametrize("family", ["qwen2", *EXPERTS])
def test_dense_weights_take_codes_and_full_precision(tmp_path, family):
    first, _ = packed(tmp_path / "first", family, settings={"weights": "dense"}, preset="w4a16")
    second, full = packed(tmp_path / "second", family, seed=1, preset="w4a16")
    expected = model_logprobs(second)
    unquantized = model_logprobs(full)
    assert (expected - unquantized).abs().max() > 0.05
    with engine(tmp_path / "first" / "saved") as llm:
        model = served_model(llm)
        kinds = {type(layer.quant_method).__name__ for layer in expert_layers(llm)}
        assert kinds == ({"MXFP4RLDenseExpertsMethod"} if family in EXPERTS else set())
        assert (vllm_logprobs(llm) - model_logprobs(first)).abs().max() < 1e-4
        push(model, load_file(tmp_path / "second" / "saved" / "model.safetensors"))
        assert (vllm_logprobs(llm) - expected).abs().max() < 1e-4
        push(model, dict(full.named_parameters()))
        assert (vllm_logprobs(llm) - unquantized).abs().max() < 1e-4
