# SPDX-License-Identifier: Apache-2.0
"""What vLLM computes with: the dtype and form that it keeps weights in, and what it does to the inputs of layers."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedConfig

from ..._logging import get_logger
from ...config import MXFP4RLConfig
from ...integrations.peft import adapter_rank, base_scheme, has_inseparable_adapters
from ...integrations.vllm import SETTINGS_KEY, EngineSettings
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
        is_assumed: whether some of that is read off the checkpoint that it was started on, since it does not say.
        scheme: of its quantized layers; `None` where it has none of ours, or does not say which.
        settings: how it keeps their weights; `None` without a scheme.
    """

    dtype: torch.dtype
    inputs: Any
    is_assumed: bool
    scheme: MXFP4RLConfig | None = None
    settings: EngineSettings | None = None

    @classmethod
    def of(cls, generation: Any) -> "VLLMEngine":
        """Ask TRL's `VLLMGeneration`: its vLLM in this process or its server; for want of an answer, the checkpoint of
        its model. All processes must call this."""
        config = getattr(getattr(getattr(generation, "llm", None), "llm_engine", None), "vllm_config", None)
        if config is not None:
            scheme = getattr(config.quant_config, "scheme", None)
            if not isinstance(scheme, MXFP4RLConfig):
                return cls(config.model_config.dtype, None, is_assumed=False)
            settings = getattr(config.quant_config, "settings", None) or EngineSettings(weights="dense")
            return cls(config.model_config.dtype, scheme.activation_scheme, False, scheme, settings)
        answer = _server_answer(generation)
        stored = stored_config(answer.get("model") or getattr(getattr(generation, "model", None), "name_or_path", ""))
        overrides = answer.get("hf_overrides")  # of a server that was given another scheme than its checkpoint has
        stored = {**stored, **(overrides if isinstance(overrides, dict) else {})}
        scheme = stored.get("quantization_config") or {}
        is_ours = scheme.get("quant_method") == QUANT_METHOD
        # Of a plugin's scheme a server gives the name alone.
        is_known = "dtype" in answer and is_ours == (answer.get("quantization") == QUANT_METHOD)
        dtype = _dtype(answer["dtype"]) if "dtype" in answer else None
        if dtype is None:
            dtype = _dtype(stored.get("dtype", stored.get("torch_dtype"))) or torch.float32
            dtype = torch.bfloat16 if dtype == torch.float32 else dtype  # as vLLM's dtype="auto" does
        if not is_ours:
            return cls(dtype, None, is_assumed=not is_known)
        settings = EngineSettings.read(scheme.get(SETTINGS_KEY))
        scheme = MXFP4RLConfig.from_dict(scheme)
        # A server that does not say is not given codes.
        known = (scheme, settings) if is_known else (None, None)
        return cls(dtype, scheme.activation_scheme, not is_known, *known)

    @property
    def is_packed(self) -> bool:
        """Whether quantized weights are kept in 4 bits."""
        return self.settings is not None and self.settings.weights == "packed"

    def check(self, model: nn.Module, args: MXFP4GRPOConfig) -> None:
        """Raise `ValueError` where vLLM keeps weights in 4 bits and cannot be given the policy so: it would quantize
        what is pushed to it a second time."""
        if not self.is_packed:
            return
        differing = {str(layer.config.weight_scheme) for layer in _quantized(model)} - {str(self.scheme.weight_scheme)}
        skips, trained = self.scheme.modules_to_not_convert, base_scheme(model)
        if differing:
            what = f"quantizes weights by {self.scheme.weight_scheme} and the policy by {' and '.join(differing)}"
        elif trained is not None and trained.modules_to_not_convert != skips:
            what = f"has modules_to_not_convert={skips} and the policy {trained.modules_to_not_convert}"
        else:
            what = needs_dense(model)
        if what:
            raise ValueError(
                f"vLLM keeps weights in 4 bits, and {what}: start it in the scheme of the policy, with "
                f'{{"{SETTINGS_KEY}": {{"weights": "dense"}}}} inside of quantization_config (docs/vllm.md)'
            )
        rank = adapter_rank(model)
        if rank > self.settings.adapter_rank:
            raise ValueError(
                f"vLLM has room for adapters of rank {self.settings.adapter_rank} beside 4-bit weights, and those of "
                f'the policy have rank {rank}: start it with {{"{SETTINGS_KEY}": {{"adapter_rank": {rank}}}}} inside '
                "of quantization_config (docs/vllm.md)"
            )

    def quantizes_as(self, model: nn.Module) -> bool:
        """Whether the inputs of all quantized layers of the policy are quantized here as they are there."""
        return all(layer.config.activation_scheme == self.inputs for layer in _quantized(model))

    def describe(self, model: nn.Module, args: MXFP4GRPOConfig) -> None:
        """Log what vLLM samples with, and warn where it is something else than the policy trains with."""
        source = "assumed from its checkpoint, as dtype='auto' does" if self.is_assumed else "as it says"
        name = str(self.dtype).removeprefix("torch.")
        form = f"quantized weights in 4 bits, others in {name}" if self.is_packed else f"weights in {name}"
        get_logger().info("vLLM keeps %s (%s)", form, source)
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


def needs_dense(model: nn.Module) -> str | None:
    """Why the weights that the policy samples with are not those of 4 bits; `None` where they are."""
    if has_inseparable_adapters(model):
        return "adapters on experts are added to them"
    return None


def _words(inputs: Any) -> str:
    return "full-precision activations, W4A16" if inputs is None else "quantized activations, W4A4"


def _quantized(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, QUANTIZED)]


def _server_answer(generation: Any) -> dict[str, Any]:
    """What a vLLM server says of its model, to all processes; empty where there is none, or it does not say."""
    if getattr(generation, "mode", None) != "server":
        return {}
    answers = [{}]
    client = getattr(generation, "vllm_client", None)  # of the main process
    if client is not None:
        try:
            answers = [client.get_server_info()["model_config"]]
        except (OSError, RuntimeError, KeyError) as error:
            get_logger().info("the vLLM server does not say what it computes with: %s", error)
    broadcast_object_list(answers, from_process=0)
    return answers[0]


def _dtype(name: Any) -> torch.dtype | None:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def stored_config(name: str) -> dict[str, Any]:
    """`config.json` of a checkpoint that is here already; empty without one."""
    try:
        return PreTrainedConfig.get_config_dict(name, local_files_only=True)[0] if name else {}
    except (OSError, ValueError):
        return {}
