# SPDX-License-Identifier: Apache-2.0
"""What is pushed into packed linear layers inside vLLM: codes, weights in full precision, adapters."""

import pytest
import torch
from harness import (
    engine,
    model_logprobs,
    served_model,
    served_weights,
    tiny_model,
    vllm_logprobs,
    with_settings,
)
from packed_values import values_inside
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hf_mxfp4 import MXFP4RLConfig


pytestmark = pytest.mark.vllm

LAYERS = ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def packed(folder, seed=0, family="qwen2", **scheme):
    """A packed model, saved, and the full-precision one that it is of."""
    base = tiny_model(family, seed=seed)
    base.save_pretrained(folder / "base")
    config = MXFP4RLConfig(mode="packed", **scheme)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config)
    model.save_pretrained(folder / "packed")
    return model, base


def with_adapters(model, seed=0, **options):
    """LoRA that changes the model, and what is to be pushed of it."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, **{"target_modules": "all-linear", **options})
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
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


def push(model, tensors):
    """One tensor in each call, as TRL does."""
    for name, tensor in tensors.items():
        model.load_weights([(name, tensor)])


def assert_same_values(inside, model, scheme):
    for name in (f"model.layers.1.{layer}" for layer in LAYERS):
        assert torch.equal(values_inside(inside, name, scheme), model.get_submodule(name).dequantized_weight())


def test_codes_full_precision_and_reloading_write_in_place(tmp_path):
    first, _ = packed(tmp_path / "first")
    other, full = packed(tmp_path / "other", seed=1)
    scheme, expected = other.config.quantization_config.weight_scheme, model_logprobs(other)
    with engine(tmp_path / "first" / "packed") as llm:
        model = served_model(llm)
        before = addresses(model)
        assert_same_values(served_weights(model), first, scheme)
        assert (vllm_logprobs(llm) - expected).abs().max() > 0.05

        push(model, other.state_dict())
        assert_same_values(served_weights(model), other, scheme)
        assert (vllm_logprobs(llm) - expected).abs().max() < 1e-4

        push(model, first.state_dict())
        push(model, dict(full.named_parameters()))
        assert_same_values(served_weights(model), other, scheme)

        push(model, first.state_dict())
        initialize_layerwise_reload(model)
        model.load_weights(other.state_dict().items())
        finalize_layerwise_reload(model, llm.llm_engine.vllm_config.model_config)
        assert_same_values(served_weights(model), other, scheme)
        assert (vllm_logprobs(llm) - expected).abs().max() < 1e-4
        assert addresses(model) == before
        with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight was pushed.*set adapter_rank"):
            push(model, {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 256)})


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_adapters_beside_packed_weights(tmp_path, preset):
    policy, _ = packed(tmp_path, preset=preset)
    plain, saved = model_logprobs(policy), policy.state_dict()
    adapted, tensors = with_adapters(policy)
    expected = model_logprobs(adapted)
    assert (expected - plain).abs().max() > 0.05
    folder = with_settings(tmp_path / "packed", adapter_rank=8)
    with engine(folder) as llm:
        model = served_model(llm)
        before = addresses(model)
        assert measure(vllm_logprobs(llm) - plain, preset) < 1e-4
        push(model, tensors)
        assert measure(vllm_logprobs(llm) - expected, preset) < 1e-4
        initialize_layerwise_reload(model)
        model.load_weights(saved.items())
        finalize_layerwise_reload(model, llm.llm_engine.vllm_config.model_config)
        assert measure(vllm_logprobs(llm) - expected, preset) < 1e-4
        push(model, {name: torch.zeros_like(tensor[:1]) for name, tensor in tensors.items() if "lora_A" in name})
        assert measure(vllm_logprobs(llm) - plain, preset) < 1e-4
        assert addresses(model) == before
        with pytest.raises(ValueError, match=r"down_proj: an adapter of rank 9 was pushed.* room for rank 8"):
            push(model, {"model.layers.0.mlp.down_proj.lora_A.weight": torch.zeros(9, 512)})


def measure(difference, preset):
    """Under w4a4, values on edges of the grid fall to either side."""
    return difference.abs().max() if preset == "w4a16" else difference.abs().median()


def test_dense_weights_take_codes_and_full_precision(tmp_path):
    policy, _ = packed(tmp_path / "first")
    other, full = packed(tmp_path / "other", seed=1)
    expected = model_logprobs(other)
    with engine(with_settings(tmp_path / "first" / "packed", weights="dense")) as llm:
        model = served_model(llm)
        assert model.model.layers[1].mlp.down_proj.weight.dtype == torch.float32
        assert (vllm_logprobs(llm) - model_logprobs(policy)).abs().max() < 1e-4
        push(model, other.state_dict())
        assert (vllm_logprobs(llm) - expected).abs().max() < 1e-4
        push(model, dict(full.named_parameters()))
        assert (vllm_logprobs(llm) - model_logprobs(full)).abs().max() < 1e-4
        assert (expected - model_logprobs(full)).abs().max() > 0.05


def test_vllms_own_adapters_over_packed_layers(tmp_path):
    policy, _ = packed(tmp_path)
    plain = model_logprobs(policy)
    adapted, _ = with_adapters(policy, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    adapted.save_pretrained(tmp_path / "adapter")
    expected = model_logprobs(adapted)
    with engine(tmp_path / "packed", enable_lora=True, max_lora_rank=8) as llm:
        assert (vllm_logprobs(llm) - plain).abs().max() < 1e-4
        request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        assert (vllm_logprobs(llm, lora_request=request) - expected).abs().max() < 1e-4
    assert (expected - plain).abs().max() > 0.05
