# SPDX-License-Identifier: Apache-2.0
"""What vLLM computes with: the dtype that it keeps weights in, and what it does to the inputs of layers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..._logging import get_logger
from ...config import MXFP4RLConfig
from ...layers import QUANTIZED
from ...registration import QUANT_METHOD
from ..config import MXFP4GRPOConfig
from .correction_options import limits_in_force


@dataclass(frozen=True)
class VLLMEngine:
    """What is known of the vLLM that samples.

    Attributes:
        dtype: of its weights.
        inputs: the scheme that its layers quantize their inputs by; `None` for full precision.
        is_assumed: whether that is read off the checkpoint that it was started on, since it runs in a process of its
            own (server mode), which does not say.
    """

    dtype: torch.dtype
    inputs: Any
    is_assumed: bool

    @classmethod
    def of(cls, generation: Any) -> "VLLMEngine":
        """Ask TRL's `VLLMGeneration`, or for want of an answer the checkpoint of its model."""
        config = getattr(getattr(getattr(generation, "llm", None), "llm_engine", None), "vllm_config", None)
        if config is not None:
            scheme = getattr(config.quant_config, "scheme", None)
            inputs = scheme.activation_scheme if isinstance(scheme, MXFP4RLConfig) else None
            return cls(config.model_config.dtype, inputs, is_assumed=False)
        stored = _stored_config(getattr(getattr(generation, "model", None), "name_or_path", ""))
        name = str(stored.get("dtype", stored.get("torch_dtype"))).removeprefix("torch.")
        dtype = getattr(torch, name, torch.float32)
        # As its dtype="auto" does.
        dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        scheme = stored.get("quantization_config") or {}
        is_ours = scheme.get("quant_method") == QUANT_METHOD
        return cls(dtype, MXFP4RLConfig.from_dict(scheme).activation_scheme if is_ours else None, is_assumed=True)

    def quantizes_as(self, model: nn.Module) -> bool:
        """Whether the inputs of all quantized layers of the policy are quantized here as they are there."""
        return all(layer.config.activation_scheme == self.inputs for layer in _quantized(model))

    def describe(self, model: nn.Module, args: MXFP4GRPOConfig) -> None:
        """Log what vLLM samples with, and warn where it is something else than the policy trains with."""
        source = "assumed from its checkpoint, as dtype='auto' does" if self.is_assumed else "as it says"
        get_logger().info("vLLM keeps weights in %s (%s)", str(self.dtype).removeprefix("torch."), source)
        if self.quantizes_as(model):
            if self.inputs is not None:
                get_logger().info("vLLM quantizes the inputs of layers as the policy does (%s)", source)
            return
        limits = limits_in_force(args)
        trained = " and ".join(sorted({_words(layer.config.activation_scheme) for layer in _quantized(model)}))
        get_logger().warning(
            "vLLM samples with %s (%s) and the policy trains with %s%s; %s",
            _words(self.inputs),
            source,
            trained,
            " by another scheme" if trained == _words(self.inputs) else "",
            "nothing corrects the difference, since the correction is off"
            if limits is None
            else f"importance weights ({limits[0]}) account for the difference",
        )


def _words(inputs: Any) -> str:
    return "full-precision activations, W4A16" if inputs is None else "quantized activations, W4A4"


def _quantized(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, QUANTIZED)]


def _stored_config(name: str) -> dict[str, Any]:
    """`config.json` of a checkpoint that is here already; empty without one."""
    try:
        return PreTrainedConfig.get_config_dict(name, local_files_only=True)[0] if name else {}
    except (OSError, ValueError):
        return {}
