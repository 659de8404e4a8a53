# SPDX-License-Identifier: Apache-2.0
"""How TRL's colocated vLLM is started: on the policy's checkpoint, in the policy's scheme.

TRL gives vLLM the name of the checkpoint and nothing of how the policy was quantized, so that the checkpoint of a QAT
policy, which is in full precision, would be sampled from in full precision. The scheme is given beside the name, as
vLLM's `hf_overrides` take it: nothing is written, and vLLM reads and caches what it would have.
"""

import contextlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from trl.generation.vllm_generation import VLLMGeneration

from ..._logging import get_logger
from ...config import MXFP4RLConfig
from ...gemm import reads_packed_on_gpus
from ...integrations.peft import adapter_rank, base_scheme
from ...integrations.vllm import SETTINGS_KEY, EngineSettings
from ...layers import QUANTIZED
from ...layers.experts_base import ExpertsBase
from ...registration import QUANT_METHOD
from ..config import MXFP4GRPOConfig
from .vllm_engine import needs_dense, stored_config
from .vllm_options import given_to_vllm


@contextlib.contextmanager
def vllm_in_scheme(args: MXFP4GRPOConfig) -> Iterator[None]:
    """Within this context a `VLLMGeneration` of TRL that makes a vLLM of its own has it compute as the policy does,
    where the plugin can; where it cannot, the log says why, and vLLM is started on the checkpoint as it is."""
    if not args.use_vllm or args.vllm_mode != "colocate":
        yield
        return
    start = VLLMGeneration._init_vllm

    def start_in_scheme(generation: VLLMGeneration) -> None:
        config, words = quantization_config(generation.model, args)
        if config is not None:
            get_logger().info("vLLM is started in the scheme of the policy, %s", words)
        else:
            is_asked_for = args.vllm_weights == "checkpoint" or not _quantized(generation.model)
            (get_logger().info if is_asked_for else get_logger().warning)(
                "vLLM is started on the checkpoint of the policy as it is, and not in its scheme: %s", words
            )
        if config is None:
            start(generation)
            return
        with given_to_vllm(lambda options: _in_scheme(options, config)):
            start(generation)

    VLLMGeneration._init_vllm = start_in_scheme
    try:
        yield
    finally:
        VLLMGeneration._init_vllm = start


def _in_scheme(options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Options of vLLM, with ``config`` in the place of the checkpoint's `quantization_config`."""
    return {**options, "hf_overrides": {**(options.get("hf_overrides") or {}), "quantization_config": config}}


def quantization_config(model: nn.Module, args: MXFP4GRPOConfig) -> tuple[dict[str, Any] | None, str]:
    """What stands for `quantization_config` in the config.json of the policy's checkpoint, for vLLM to compute as the
    policy does, and what that is in words. `None`, and the reason, where vLLM can take the checkpoint only as it is.

    Raises `ValueError` for a policy that no vLLM can sample from, see [`check_forward`].
    """
    check_forward(model)
    if args.vllm_weights == "checkpoint":
        return None, "vllm_weights='checkpoint'"
    name = getattr(model, "name_or_path", "")
    stored = stored_config(name)
    reason = _unsupported_reason(model, name, stored, args)
    if reason:
        return None, reason
    dense_reason = "vllm_weights='dense'" if args.vllm_weights == "dense" else needs_dense(model)
    dense_reason = dense_reason or _slow_experts(model)
    settings = EngineSettings("dense") if dense_reason else EngineSettings("packed", adapter_rank(model))
    mode = (stored.get("quantization_config") or {}).get("mode", "qat")
    # What is left out is about gradients alone.
    scheme = replace(base_scheme(model), mode=mode, layer_overrides=None, stochastic_seed=0)
    kept = f"dense: {dense_reason}"
    if not dense_reason:
        kept = f"in 4 bits, with room for adapters of rank {settings.adapter_rank}"
    words = f"{scheme.describe()} (mode {mode}), quantized weights {kept}"
    return {**scheme.to_dict(), SETTINGS_KEY: settings.to_dict()}, words


def tell_how_to_serve(model: nn.Module, args: MXFP4GRPOConfig) -> None:
    """Log how a server is started that computes as the policy does, for who has one that knows nothing of it."""
    config, words = quantization_config(model, args)
    if config is None:
        get_logger().info("the vLLM server cannot be started in the scheme of the policy: %s", words)
        return
    overrides = json.dumps({"quantization_config": config})
    get_logger().info(
        "the vLLM server keeps weights in 16 bits. One in the scheme of the policy, %s, is started by %s",
        words,
        shlex.join(["vllm", "serve", model.name_or_path, "--host", "127.0.0.1", "--hf-overrides", overrides]),
    )


def check_forward(model: nn.Module) -> None:
    """Raise `ValueError` for a forward scheme that weights alone cannot express, such as one with rotated operands."""
    for name, layer in model.named_modules():
        if isinstance(layer, QUANTIZED) and layer.config.weights_alone_unsupported_reason:
            raise ValueError(
                f"vLLM cannot sample from {name}: {layer.config.weights_alone_unsupported_reason}; set use_vllm=False"
            )


def _quantized(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, QUANTIZED)]


def _slow_experts(model: nn.Module) -> str | None:
    """Why packed experts cannot be in vLLM's CUDA graphs; `None` where they can, or there are none of the two."""
    for layer in _quantized(model):
        if isinstance(layer, ExpertsBase) and torch.cuda.is_available():
            weights, backend = layer.config.weight_scheme, layer.config.backend
            if not reads_packed_on_gpus(weights, backend):
                return f"no kernel multiplies with experts packed by {weights} (backend={backend!r})"
    return None


def _unsupported_reason(model: nn.Module, name: str, stored: dict[str, Any], args: MXFP4GRPOConfig) -> str | None:
    """Why vLLM cannot be started in the scheme of the policy on its checkpoint."""
    scheme = base_scheme(model)
    if not _quantized(model):
        return "it has no quantized layer"
    if scheme is None:
        return "its config does not have the scheme: it was not quantized by from_pretrained"
    if not stored:
        return f"its checkpoint, {name!r}, has no config.json on this machine"
    if args.vllm_model_impl not in ("auto", "vllm"):
        return f"vllm_model_impl={args.vllm_model_impl!r} loads weights past the plugin"
    theirs = stored.get("quantization_config") or {}
    if theirs and theirs.get("quant_method") != QUANT_METHOD:
        return f"its checkpoint is quantized by {theirs.get('quant_method')!r}"
    if theirs.get("mode") == "packed":
        packed = MXFP4RLConfig.from_dict(theirs)
        if scheme.mode != "packed" or packed.weight_scheme != scheme.weight_scheme:
            return f"its checkpoint is packed by another scheme, {packed.describe()}"
    return None
