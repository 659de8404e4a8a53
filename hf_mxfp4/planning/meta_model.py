# SPDX-License-Identifier: Apache-2.0
"""A model without memory: its modules and tensors as they would be in training, of which only shapes exist."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..checkpoint.io.folder import refuse_kernels
from ..config import MXFP4RLConfig
from ..gemm.storage.packed_weight import packed_shapes
from ..layers import MXFP4Linear, MXFP4PackedLinear
from ..module_names import fused_experts, split_linears
from ..quantizer.swap import swap_layers


def read_config(model: str) -> PreTrainedConfig:
    """The architecture that a user means by ``model``: a folder, a `config.json`, or a hub id.

    Raises `ValueError` when there is none, or its class is unknown to transformers.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{model} has no config.json")
    if path.suffix == ".json":
        try:
            options = json.loads(path.read_text())
            refuse_kernels(options, model)
            return AutoConfig.for_model(options.pop("model_type"), **options)
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{model} cannot be read as a config.json: {error!r}") from error
    try:
        options, _ = PreTrainedConfig.get_config_dict(model)
        refuse_kernels(options, model)
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model!r} is no folder with a config.json, no such file, and no model that the Hub gives: {error}"
        ) from error


class PlannedExperts(nn.Module):
    """Stands for a module that holds the weights of many experts in 3-D parameters.

    It keeps what a grouped product of all tokens with their experts keeps: each token gathered once per expert that it
    goes to, the two products, and what lies between.
    """

    def __init__(self, experts: nn.Module, config: MXFP4RLConfig | None):
        super().__init__()
        for name, parameter in experts.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        # The gate and the way up in one, and the way down; which axis is which differs between models.
        up, down = sorted((p for p in self.parameters() if p.dim() == 3), key=lambda p: p.numel(), reverse=True)[:2]
        (self._hidden,) = set(up.shape[1:]) & set(down.shape[1:])
        self._inner, self._dtype = down[0].numel() // self._hidden, up.dtype
        self._gated = up.numel() == 2 * down.numel()
        self._config = config
        self.quantized_elements = 0 if config is None else up.numel() + down.numel()
        packed = config is not None and config.mode == "packed"
        # Trained experts have a copy of each projection; packed ones are dequantized one by one and not kept.
        self.cached_elements = 0 if packed else self.quantized_elements
        self.largest_copy = 0 if config is None else up[0].numel() if packed else up.numel()
        if packed:
            for name, parameter in list(self.named_parameters()):
                if parameter.dim() == 3:
                    self._pack(name, parameter)
        self.set_linears()

    def _pack(self, name: str, weight: nn.Parameter) -> None:
        shapes = packed_shapes(weight.shape[0] * weight.shape[1], weight.shape[2], self._config.weight_scheme)
        tensor = weight.new_empty(sum(rows * columns for rows, columns in shapes.values()), dtype=torch.uint8)
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def set_linears(self) -> None:
        """Make the layers that one expert consists of, on the device of the mode in force."""
        # In a tuple, since they are no submodules: the parameters that count are the 3-D ones.
        first = self._inner * (2 if self._gated else 1)
        self._linears = self._linear(self._hidden, first), self._linear(self._inner, self._hidden)

    def _linear(self, in_features: int, out_features: int) -> nn.Linear:
        if self._config is None:
            return nn.Linear(in_features, out_features, bias=False, dtype=self._dtype)
        if self._config.mode == "packed":
            return nn.Linear(in_features, out_features, bias=False, dtype=self._dtype).requires_grad_(False)
        return MXFP4Linear(in_features, out_features, bias=False, dtype=self._dtype, config=self._config)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        first, second = self._linears
        rows = hidden.reshape(-1, hidden.shape[-1])
        k = top_k_index.numel() // rows.shape[0]
        token = torch.arange(rows.shape[0] * k, device=hidden.device) // k
        inner = first(rows[token])
        if self._gated:
            gate, up = inner.split([self._inner] * 2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.silu(inner)
        out = second(inner) * top_k_weights.reshape(-1, 1).to(hidden.dtype)
        return torch.zeros_like(rows).index_add(0, token, out.to(rows.dtype)).view(hidden.shape)


def build(
    config: PreTrainedConfig, quantization: MXFP4RLConfig | None, dtype: torch.dtype, lora_rank: int = 0
) -> tuple[PreTrainedModel, FakeTensorMode]:
    """The model in training, of tensors without memory, and the mode that it computes in.

    Args:
        config: of the architecture; its own quantization config does not count.
        quantization: the scheme; `None` for full precision.
        dtype: of the parameters that are not packed.
        lora_rank: of adapters on all linear layers, whose base is frozen; 0 for none.

    Raises `ValueError` when no causal language model belongs to the config, or nothing in it can be quantized.
    """
    config = type(config).from_dict({**config.to_dict(), "quantization_config": None})
    del config.quantization_config
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        experts = fused_experts(model, (quantization.modules_to_not_convert or ()) if quantization else ())
        if quantization is not None:
            linears, _ = split_linears(model, quantization.modules_to_not_convert or ())
            if not linears and not experts:
                raise ValueError(f"{type(model).__name__} has no layer to quantize")
            swap_layers(model, linears, quantization, _maker(quantization))
        for name in fused_experts(model):
            model.set_submodule(
                name, PlannedExperts(model.get_submodule(name), quantization if name in experts else None)
            )
        model.train()
        if lora_rank:
            model = _with_adapters(model, lora_rank)
    mode = FakeTensorMode()
    _pretend_on_cpu(model, mode)
    return model, mode


def _pretend_on_cpu(model: nn.Module, mode: FakeTensorMode) -> None:
    """Exchange meta tensors for such that say they were on the CPU: there autocast works, and attention is computed by
    the fused function, which saves what that of a GPU does."""
    exchanged: dict[int, torch.Tensor] = {}
    with mode:
        for module in model.modules():
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if id(tensor) not in exchanged:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    exchanged[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                    )
                setattr(module, name, exchanged[id(tensor)])
            if isinstance(module, PlannedExperts):
                module.set_linears()


def _maker(quantization: MXFP4RLConfig) -> Callable[[nn.Linear, MXFP4RLConfig, str], nn.Linear]:
    if quantization.mode == "qat":
        return MXFP4Linear.from_linear

    def packed(linear: nn.Linear, config: MXFP4RLConfig, name: str) -> nn.Linear:
        features, bias = (linear.in_features, linear.out_features), linear.bias is not None
        return MXFP4PackedLinear(*features, bias, dtype=linear.weight.dtype, config=config, name=name)

    return packed


def _with_adapters(model: PreTrainedModel, rank: int) -> nn.Module:
    import warnings

    from peft import LoraConfig, get_peft_model

    # Adapters of packed layers are made by a class that PEFT learns of here.
    from .. import adapters  # noqa: F401

    # By name, since PEFT would take "all-linear" for the experts too, which have no adapters on packed weights.
    names = [name for name, module in model.named_modules() if isinstance(module, MXFP4PackedLinear)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a property that transformers has renamed
        return get_peft_model(model, LoraConfig(r=rank, task_type="CAUSAL_LM", target_modules=names))
