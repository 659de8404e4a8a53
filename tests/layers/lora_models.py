# SPDX-License-Identifier: Apache-2.0
"""Adapters of tests, what they add to a weight, and what training them gives."""

import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.peft import MXFP4LoraExpertParameter, MXFP4LoraPackedExpertParameter
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.layers import MXFP4Experts, MXFP4PackedExperts


IDS = torch.arange(2, 14).view(2, 6)
UP = "base_model.model.model.layers.0.mlp.up_proj"


def with_lora(model, adapter="default", std=None, **options) -> PeftModel:
    """Adapters that already do something: as PEFT draws them, or by [`fill`] where ``std`` is given."""
    torch.manual_seed(0)
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "init_lora_weights": std is not None,
        **options,
    }
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name=adapter)
    if std is not None:
        fill(model, adapter, std)
    return model.eval()


def qat(family="qwen2", layers=1, **scheme):
    """A model whose weights are quantized as they are used."""
    model = make_model(family, layers=layers)
    quantize_linears(model, MXFP4RLConfig(**{"preset": "w4a16", **scheme}))
    return model


def fill(model, adapter, std):
    """Make the factors of an adapter normal: ``A`` of deviation 0.1, ``B`` of ``std``."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".{adapter}." in name and ("lora_A" in name or "lora_B" in name):
                size = std if "lora_B" in name else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def delta(layer, name="default") -> torch.Tensor:
    """What an adapter of a linear layer adds to the weight: ``s B A``."""
    return layer.scaling[name] * (layer.lora_B[name].weight @ layer.lora_A[name].weight).detach()


def gradients(model, **inputs) -> dict[str, torch.Tensor]:
    """The gradients of a training step, of those parameters that have one."""
    model.train()
    model.zero_grad(set_to_none=True)
    model(IDS, labels=IDS, use_cache=False, **inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def stored(model) -> dict[str, torch.Tensor]:
    """Copies of all parameters but the adapters'."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}


def same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names, and the same values to the bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


#: Adapters of one parameter of experts.
WRAPPERS = (MXFP4LoraExpertParameter, MXFP4LoraPackedExpertParameter)


def wrappers(model) -> dict[str, ParamWrapper]:
    """The adapters of a layer of experts by the names of their parameters."""
    return {m.parameter_name: m for m in model.modules() if isinstance(m, WRAPPERS)}


def experts_of(model) -> MXFP4Experts | MXFP4PackedExperts:
    return next(m for m in model.modules() if isinstance(m, (MXFP4Experts, MXFP4PackedExperts)))


def changes_of(module: torch.nn.Module, name: str = "default") -> dict[str, torch.Tensor]:
    """Return what an adapter of experts adds to each projection, in the layout of the model.

    For trainable experts these are PEFT's own sums, rounded to the dtype of the model.
    """
    found = {}
    for projection, wrapper in wrappers(module).items():
        if isinstance(wrapper, MXFP4LoraExpertParameter):
            found[projection] = wrapper.get_delta_weight(name)
        else:
            a, b = wrapper.expert_factors(name)
            delta = wrapper.scaling[name] * torch.einsum("enr,erk->enk", b, a)
            found[projection] = delta.transpose(1, 2) if wrapper.get_base_layer().is_transposed else delta
    return found


def summed_twin(model: PeftModel):
    """Return a plain model of weights ``Q(W) + s B A`` for experts, differentiable in the factors of ``model``, and
    ``Q(W)`` for linear layers."""
    twin = copy.deepcopy(model.get_base_model())
    for name, module in list(twin.named_modules()):
        if name.endswith(".experts") and isinstance(module, WRAPPERS):
            layer = model.get_base_model().get_submodule(name)
            plain = experts_of(module).to_experts(torch.float32)
            for projection, delta in changes_of(layer).items():
                weight = getattr(plain, projection).detach() + delta
                del plain._parameters[projection]
                setattr(plain, projection, weight)
            twin.set_submodule(name, plain)
        elif hasattr(module, "to_linear"):
            twin.set_submodule(name, module.to_linear().requires_grad_(False))
    twin.config._experts_implementation = "eager"
    return twin
