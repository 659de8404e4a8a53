# SPDX-License-Identifier: Apache-2.0
"""The vLLM that samples: how TRL's colocated one is started in the scheme of the policy, what it computes with, and
errors of a server.

TRL gives vLLM the name of the checkpoint alone, and that of a QAT policy is in full precision. The scheme is given as
vLLM's `hf_overrides`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedConfig
from trl.generation import vllm_generation

from .._logging import get_logger
from ..config import MXFP4RLConfig
from ..integrations.peft import adapter_rank, base_scheme, has_inseparable_adapters
from ..integrations.vllm import SETTINGS_KEY, EngineSettings
from ..layers import QUANTIZED, ExpertsBase
from ..ops import reads_packed_on_gpus
from ..registration import QUANT_METHOD
from ..utils import replaced_method
from .rollout import is_corrected


#: vLLM's option for router replay; it brings model runner V2, which it refuses to do without (and that needs Triton).
EXPERTS_OPTION = "enable_return_routed_experts"


class VLLMServerError(RuntimeError):
    """The vLLM server does not answer, or cannot do what it was asked."""


# ---- starting one -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def vllm_in_scheme(args: Any) -> Iterator[None]:
    """Have TRL, within this context, make a colocated vLLM that computes as the policy does, where the plugin can (the
    log says why not), and that returns the experts it chooses for `router_replay`."""
    llm_class = getattr(vllm_generation, "LLM", None)
    if not args.use_vllm or args.vllm_mode != "colocate" or llm_class is None:  # without vLLM TRL raises
        yield
        return
    init = vllm_generation.VLLMGeneration._init_vllm
    engines = []

    def init_in_scheme(generation: Any) -> None:
        options = _options(generation.model, args)

        def make_engine(**options_of_trl: Any) -> Any:
            engines.append(llm_class(**{**options_of_trl, **options}))
            return engines[-1]

        with replaced_method(vllm_generation, "LLM", make_engine):
            init(generation)

    with replaced_method(vllm_generation.VLLMGeneration, "_init_vllm", init_in_scheme):
        yield
    if not engines:
        raise RuntimeError("TRL starts vLLM in another way than this version of hf-mxfp4 knows")


def _options(model: nn.Module, args: Any) -> dict[str, Any]:
    """Return what to add to the options that TRL makes its colocated vLLM with."""
    options: dict[str, Any] = {}
    if args.router_replay:
        options[EXPERTS_OPTION] = True
    config, description = quantization_config(model, args)
    if config is not None:
        get_logger().info("vLLM is started in the scheme of the policy, %s", description)
        return {**options, "hf_overrides": {"quantization_config": config}}
    log = get_logger().warning
    if args.vllm_weights == "checkpoint" or not _quantized(model):
        log = get_logger().info
    log("vLLM is started on the checkpoint of the policy as it is, and not in its scheme: %s", description)
    return options


def quantization_config(model: nn.Module, args: Any) -> tuple[dict[str, Any] | None, str]:
    """Return the `quantization_config` for vLLM to compute as the policy does, and what that is in words; `None`, and
    the reason, where vLLM can take the checkpoint only as it is. Raises as [`check_forward`]."""
    check_forward(model)
    if args.vllm_weights == "checkpoint":
        return None, "vllm_weights='checkpoint'"
    name = getattr(model, "name_or_path", "")
    stored = _stored_config(name)
    reason = _unsupported_reason(model, name, stored, args)
    if reason:
        return None, reason
    if args.vllm_weights == "dense":
        dense_reason: str | None = "vllm_weights='dense'"
    else:
        dense_reason = needs_dense(model) or _slow_experts(model)
    if dense_reason:
        settings = EngineSettings("dense")
        form = f"dense: {dense_reason}"
    else:
        settings = EngineSettings("packed", adapter_rank(model))
        form = f"in 4 bits, for adapters up to rank {settings.adapter_rank}"
    mode = (stored.get("quantization_config") or {}).get("mode", "qat")
    scheme = replace(base_scheme(model), mode=mode, stochastic_seed=0)  # vLLM computes no gradients
    description = f"{scheme.describe()} (mode {mode}), quantized weights {form}"
    return {**scheme.to_dict(), SETTINGS_KEY: asdict(settings)}, description


def _unsupported_reason(model: nn.Module, name: str, stored: dict[str, Any], args: Any) -> str | None:
    """Return why vLLM cannot be started in the scheme of the policy on its checkpoint; `None` where it can."""
    scheme = base_scheme(model)
    stored_scheme = stored.get("quantization_config") or {}
    if not _quantized(model):
        return "it has no quantized layer"
    if scheme is None:
        return "its config does not have the scheme: it was not quantized by from_pretrained"
    if not stored:
        return f"its checkpoint, {name!r}, has no config.json on this machine"
    if args.vllm_model_impl not in ("auto", "vllm"):
        return f"vllm_model_impl={args.vllm_model_impl!r} loads weights past the plugin"
    if stored_scheme and stored_scheme.get("quant_method") != QUANT_METHOD:
        return f"its checkpoint is quantized by {stored_scheme.get('quant_method')!r}"
    if stored_scheme.get("mode") == "packed":
        packed = MXFP4RLConfig.from_dict(stored_scheme)
        if scheme.mode != "packed" or packed.weight_scheme != scheme.weight_scheme:
            return f"its checkpoint is packed by another scheme, {packed.describe()}"
    return None


def _slow_experts(model: nn.Module) -> str | None:
    """Return why packed experts cannot be in vLLM's CUDA graphs; `None` where they can, or without experts or GPU."""
    if not torch.cuda.is_available():
        return None
    for layer in _quantized(model):
        config = layer.config
        if isinstance(layer, ExpertsBase) and not reads_packed_on_gpus(config.weight_scheme, config.backend):
            return f"no kernel multiplies with experts packed by {config.weight_scheme} (backend={config.backend!r})"
    return None


def needs_dense(model: nn.Module) -> str | None:
    """Return why vLLM cannot keep the weights of the policy in 4 bits; `None` where it can."""
    if has_inseparable_adapters(model):
        return "adapters on experts are added to them"
    return None


def check_forward(model: nn.Module) -> None:
    """Raise `ValueError` for a forward scheme that weights alone cannot express, such as one with rotated operands."""
    for name, layer in model.named_modules():
        reason = layer.config.weights_alone_unsupported_reason if isinstance(layer, QUANTIZED) else None
        if reason:
            raise ValueError(f"vLLM cannot sample from {name}: {reason}; set use_vllm=False")


def check_served(model: nn.Module) -> None:
    """Raise `ValueError` for a model that a vLLM server (0.32) loses parts of, since it reloads layer by layer."""
    if model.config.model_type == "gpt_oss":
        raise ValueError(
            "a vLLM server that is given weights of gpt-oss loses its sinks and the biases of experts (vLLM 0.32); use "
            "vllm_mode='colocate' or use_vllm=False"
        )


# ---- what it computes with ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VLLMEngine:
    """What is known of the vLLM that samples.

    Attributes:
        dtype: of its weights.
        inputs: the scheme by which its layers quantize their inputs; `None` for full precision.
        scheme: of its layers; `None` where the scheme is not of this package, or vLLM does not report it.
        settings: how it keeps their weights; `None` without a scheme.
    """

    dtype: torch.dtype
    inputs: Any
    scheme: MXFP4RLConfig | None = None
    settings: EngineSettings | None = None

    @classmethod
    def of(cls, generation: Any) -> "VLLMEngine":
        """Ask TRL's `VLLMGeneration`: its vLLM in this process or its server. All processes must call this."""
        config = getattr(getattr(getattr(generation, "llm", None), "llm_engine", None), "vllm_config", None)
        if config is None:
            return cls._of_server(generation)
        scheme = getattr(config.quant_config, "scheme", None)
        if not isinstance(scheme, MXFP4RLConfig):
            return cls(config.model_config.dtype, None)
        settings = getattr(config.quant_config, "settings", None) or EngineSettings(weights="dense")
        return cls(config.model_config.dtype, scheme.activation_scheme, scheme, settings)

    @classmethod
    def _of_server(cls, generation: Any) -> "VLLMEngine":
        answer = None
        client = getattr(generation, "vllm_client", None)  # in the main process alone
        if client is not None:
            answer = client.get_server_info()["model_config"]
        (answer,) = broadcast_object_list([answer], from_process=0)
        dtype = getattr(torch, str(answer["dtype"]).removeprefix("torch."))
        if answer.get("quantization") != QUANT_METHOD:
            return cls(dtype, None)
        # A server reports only the name of a plugin's scheme; the rest is in its checkpoint, or was given to it.
        config = _stored_config(answer["model"])
        overrides = answer.get("hf_overrides")
        if isinstance(overrides, dict):
            config = {**config, **overrides}
        options = config.get("quantization_config")
        if options is None:
            get_logger().warning("the scheme of vLLM is not known: its checkpoint %s is not here", answer["model"])
            return cls(dtype, None)
        scheme = MXFP4RLConfig.from_dict(options)
        return cls(dtype, scheme.activation_scheme, scheme, EngineSettings.read(options.get(SETTINGS_KEY)))

    @property
    def is_packed(self) -> bool:
        """Return whether quantized weights are kept in 4 bits."""
        return self.settings is not None and self.settings.weights == "packed"

    def check(self, model: nn.Module) -> None:
        """Raise `ValueError` where vLLM keeps weights in a form that the policy's cannot be pushed into."""
        if not self.is_packed:
            return
        rank = adapter_rank(model)
        room = self.settings.adapter_rank
        settings: dict[str, Any] = {"weights": "dense"}
        reason = self._differs_from(model) or needs_dense(model)
        if not reason and rank > room:
            reason = f"has room for adapters of rank {room}, and those of the policy have rank {rank}"
            settings = {"adapter_rank": rank}
        if reason:
            raise ValueError(
                f"vLLM keeps weights in 4 bits, and {reason}: start it in the scheme of the policy, with "
                f"{json.dumps({SETTINGS_KEY: settings})} inside of quantization_config (docs/vllm.md)"
            )

    def _differs_from(self, model: nn.Module) -> str | None:
        """Return how vLLM quantizes weights otherwise than the policy; `None` where it does not."""
        schemes = {str(layer.config.weight_scheme) for layer in _quantized(model)} - {str(self.scheme.weight_scheme)}
        if schemes:
            return f"quantizes weights by {self.scheme.weight_scheme} and the policy by {' and '.join(schemes)}"
        skips = self.scheme.modules_to_not_convert
        trained = base_scheme(model)
        if trained is not None and trained.modules_to_not_convert != skips:
            return f"has modules_to_not_convert={skips} and the policy {trained.modules_to_not_convert}"
        return None

    def quantizes_as(self, model: nn.Module) -> bool:
        """Return whether the inputs of all quantized layers of the policy are quantized here as they are there."""
        return all(layer.config.activation_scheme == self.inputs for layer in _quantized(model))

    def describe(self, model: nn.Module, args: Any) -> None:
        """Log what vLLM samples with, and warn where the policy trains with something else."""
        form = "quantized weights in 4 bits, others in" if self.is_packed else "weights in"
        get_logger().info("vLLM keeps %s %s", form, str(self.dtype).removeprefix("torch."))
        if not self.quantizes_as(model):
            trained = " and ".join(sorted({str(layer.config.activation_scheme) for layer in _quantized(model)}))
            remedy = "nothing corrects the difference, since rollout_correction is off"
            if is_corrected(args):
                remedy = f"importance weights ({args.rollout_correction}) account for the difference"
            get_logger().warning(
                "vLLM samples with activations in %s and the policy trains with %s; %s",
                self.inputs or "full precision", trained, remedy,
            )  # fmt: skip


def _quantized(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, QUANTIZED)]


def _stored_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint that is here already; empty without one."""
    if not name:
        return {}
    try:
        options, _ = PreTrainedConfig.get_config_dict(name, local_files_only=True)
    except (OSError, ValueError):
        return {}
    return options


# ---- errors of a server -------------------------------------------------------------------------------------------


def explain_server_errors(client: Any) -> None:
    """Replace methods of TRL's `VLLMClient` by ones that raise a [`VLLMServerError`], which says how to continue."""
    client.generate = partial(_explained, client, client.generate, "sampling")
    client.update_named_params = partial(_explained, client, client.update_named_params, "receiving weights")


def _explained(client: Any, method: Callable, what: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return method(*args, **kwargs)
    except Exception as error:
        # Errors of `requests` are OSError; for answers other than 200 TRL raises a bare Exception.
        if not isinstance(error, OSError) and type(error) is not Exception:
            raise
        raise VLLMServerError(
            f"the vLLM server at {client.base_url} failed while {what}: {error}\nStart the server again with the "
            "same command, and resume this run with resume_from_checkpoint: it pushes its weights before it samples"
        ) from error
