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
    make = getattr(vllm_generation, "LLM", None)
    if not args.use_vllm or args.vllm_mode != "colocate" or make is None:  # without vLLM TRL says so
        yield
        return
    init, made = vllm_generation.VLLMGeneration._init_vllm, []

    def start(generation: Any) -> None:
        options = _options(generation.model, args)

        def make_changed(**own: Any) -> Any:
            made.append(True)
            return make(**{**own, **options})

        with replaced_method(vllm_generation, "LLM", make_changed):
            init(generation)

    with replaced_method(vllm_generation.VLLMGeneration, "_init_vllm", start):
        yield
    if not made:
        raise RuntimeError("TRL starts vLLM in another way than this version of hf-mxfp4 knows")


def _options(model: nn.Module, args: Any) -> dict[str, Any]:
    """Return what to add to the options that TRL makes its colocated vLLM with."""
    options: dict[str, Any] = {EXPERTS_OPTION: True} if args.router_replay else {}
    config, words = quantization_config(model, args)
    if config is not None:
        get_logger().info("vLLM is started in the scheme of the policy, %s", words)
        return {**options, "hf_overrides": {"quantization_config": config}}
    is_asked_for = args.vllm_weights == "checkpoint" or not _quantized(model)
    log = get_logger().info if is_asked_for else get_logger().warning
    log("vLLM is started on the checkpoint of the policy as it is, and not in its scheme: %s", words)
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
    dense_reason = (
        "vllm_weights='dense'" if args.vllm_weights == "dense" else needs_dense(model) or _slow_experts(model)
    )
    settings = EngineSettings("dense") if dense_reason else EngineSettings("packed", adapter_rank(model))
    mode = (stored.get("quantization_config") or {}).get("mode", "qat")
    # What is left out is about gradients alone.
    scheme = replace(base_scheme(model), mode=mode, stochastic_seed=0)
    form = f"dense: {dense_reason}" if dense_reason else f"in 4 bits, for adapters up to rank {settings.adapter_rank}"
    words = f"{scheme.describe()} (mode {mode}), quantized weights {form}"
    return {**scheme.to_dict(), SETTINGS_KEY: asdict(settings)}, words


def _unsupported_reason(model: nn.Module, name: str, stored: dict[str, Any], args: Any) -> str | None:
    """Why vLLM cannot be started in the scheme of the policy on its checkpoint."""
    scheme, theirs = base_scheme(model), stored.get("quantization_config") or {}
    if not _quantized(model):
        return "it has no quantized layer"
    if scheme is None:
        return "its config does not have the scheme: it was not quantized by from_pretrained"
    if not stored:
        return f"its checkpoint, {name!r}, has no config.json on this machine"
    if args.vllm_model_impl not in ("auto", "vllm"):
        return f"vllm_model_impl={args.vllm_model_impl!r} loads weights past the plugin"
    if theirs and theirs.get("quant_method") != QUANT_METHOD:
        return f"its checkpoint is quantized by {theirs.get('quant_method')!r}"
    if theirs.get("mode") == "packed":
        packed = MXFP4RLConfig.from_dict(theirs)
        if scheme.mode != "packed" or packed.weight_scheme != scheme.weight_scheme:
            return f"its checkpoint is packed by another scheme, {packed.describe()}"
    return None


def _slow_experts(model: nn.Module) -> str | None:
    """Why packed experts cannot be in vLLM's CUDA graphs; `None` where they can, or there are none of the two."""
    for layer in _quantized(model) if torch.cuda.is_available() else ():
        weights, backend = layer.config.weight_scheme, layer.config.backend
        if isinstance(layer, ExpertsBase) and not reads_packed_on_gpus(weights, backend):
            return f"no kernel multiplies with experts packed by {weights} (backend={backend!r})"
    return None


def needs_dense(model: nn.Module) -> str | None:
    """Return why the weights that the policy samples with are not those of 4 bits; `None` where they are."""
    return "adapters on experts are added to them" if has_inseparable_adapters(model) else None


def check_forward(model: nn.Module) -> None:
    """Raise `ValueError` for a forward scheme that weights alone cannot express, such as one with rotated operands."""
    for name, layer in model.named_modules():
        if isinstance(layer, QUANTIZED) and layer.config.weights_alone_unsupported_reason:
            raise ValueError(
                f"vLLM cannot sample from {name}: {layer.config.weights_alone_unsupported_reason}; set use_vllm=False"
            )


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
    """What is known of the vLLM that samples."""

    dtype: torch.dtype  # of its weights
    inputs: Any  # the scheme that its layers quantize their inputs by; `None` for full precision
    scheme: MXFP4RLConfig | None = None  # of its layers; `None` where it is none of ours, or it does not say which
    settings: EngineSettings | None = None  # how it keeps their weights; `None` without a scheme

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
        answers: list[Any] = [None]
        client = getattr(generation, "vllm_client", None)  # of the main process
        if client is not None:
            answers = [client.get_server_info()["model_config"]]
        broadcast_object_list(answers, from_process=0)
        (answer,) = answers
        dtype = getattr(torch, str(answer["dtype"]).removeprefix("torch."))
        if answer.get("quantization") != QUANT_METHOD:
            return cls(dtype, None)
        # Of a plugin's scheme a server gives the name alone; the rest is in its checkpoint, or was given to it.
        stored, overrides = _stored_config(answer["model"]), answer.get("hf_overrides")
        scheme = {**stored, **(overrides if isinstance(overrides, dict) else {})}.get("quantization_config")
        if scheme is None:
            get_logger().warning("the scheme of vLLM is not known: its checkpoint %s is not here", answer["model"])
            return cls(dtype, None)
        settings, scheme = EngineSettings.read(scheme.get(SETTINGS_KEY)), MXFP4RLConfig.from_dict(scheme)
        return cls(dtype, scheme.activation_scheme, scheme, settings)

    @property
    def is_packed(self) -> bool:
        """Whether quantized weights are kept in 4 bits."""
        return self.settings is not None and self.settings.weights == "packed"

    def check(self, model: nn.Module) -> None:
        """Raise `ValueError` where vLLM keeps weights in a form that the policy's cannot be pushed into."""
        if not self.is_packed:
            return
        rank, what = adapter_rank(model), self._differs_from(model) or needs_dense(model)
        settings: dict[str, Any] = {"weights": "dense"}
        if not what and rank > self.settings.adapter_rank:
            what = (
                f"has room for adapters of rank {self.settings.adapter_rank}, and those of the policy have rank {rank}"
            )
            settings = {"adapter_rank": rank}
        if what:
            raise ValueError(
                f"vLLM keeps weights in 4 bits, and {what}: start it in the scheme of the policy, with "
                f"{json.dumps({SETTINGS_KEY: settings})} inside of quantization_config (docs/vllm.md)"
            )

    def _differs_from(self, model: nn.Module) -> str | None:
        schemes = {str(layer.config.weight_scheme) for layer in _quantized(model)} - {str(self.scheme.weight_scheme)}
        if schemes:
            return f"quantizes weights by {self.scheme.weight_scheme} and the policy by {' and '.join(schemes)}"
        skips, trained = self.scheme.modules_to_not_convert, base_scheme(model)
        if trained is not None and trained.modules_to_not_convert != skips:
            return f"has modules_to_not_convert={skips} and the policy {trained.modules_to_not_convert}"
        return None

    def quantizes_as(self, model: nn.Module) -> bool:
        """Return whether the inputs of all quantized layers of the policy are quantized here as they are there."""
        return all(layer.config.activation_scheme == self.inputs for layer in _quantized(model))

    def describe(self, model: nn.Module, args: Any) -> None:
        """Log what vLLM samples with, and warn where it is something else than the policy trains with."""
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
    try:
        return PreTrainedConfig.get_config_dict(name, local_files_only=True)[0] if name else {}
    except (OSError, ValueError):
        return {}


# ---- errors of a server -------------------------------------------------------------------------------------------


def explain_server_errors(client: Any) -> None:
    """Make what TRL's `VLLMClient` raises a [`VLLMServerError`] that says how to go on. Replaces its methods."""
    for method, what in {"generate": "sampling", "update_named_params": "receiving weights"}.items():
        setattr(client, method, partial(_explained, client, getattr(client, method), what))


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
