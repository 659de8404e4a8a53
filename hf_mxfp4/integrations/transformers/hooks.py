# SPDX-License-Identifier: Apache-2.0
"""What this package hooks into: methods of quantized models, and models that a trainer of TRL loads by itself.

DPO and other trainers load their reference without the policy's `quantization_config`, and those that sample with vLLM
would push master weights to it. TRL has no hook for either, so the trainer is found on the call stack.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import modeling_utils

from ..._logging import get_logger
from ...checkpoint import is_quantized
from ...config import MXFP4RLConfig
from ...ops import cached_weights
from ...report import uncounted_weights


def wrap_methods(cls: type) -> None:
    """Make methods of the quantized models of a class do what such models need. Wraps each method once; those of other
    models of the class do what they always do."""
    wrap_method(cls, "generate", _generate)
    wrap_method(cls, "num_parameters", _num_parameters)
    wrap_method(cls, "load_adapter", _load_adapter)


def wrap_method(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Have a method of a class call ``around(model, original, ...)`` if it has the method."""
    if not hasattr(cls, name) or getattr(getattr(cls, name), "knows_quantized_weights", False):
        return
    own = vars(cls).get(name)

    @functools.wraps(getattr(cls, name))
    def method(self, *args, **kwargs):
        # Looked up at each call where it is inherited: others replace the method of a base class too.
        original = getattr(super(cls, self), name) if own is None else functools.partial(own, self)
        return around(self, original, *args, **kwargs)

    method.knows_quantized_weights = True  # type: ignore[attr-defined]
    setattr(cls, name, method)


def _generate(model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keep quantized weights while a call lasts, in which nothing changes them: see [`hf_mxfp4.cached_weights`]."""
    with cached_weights(model) if _keeps_weights(model) else contextlib.nullcontext():
        return original(*args, **kwargs)


def _num_parameters(
    model: nn.Module, original: Callable[..., int], only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Count the weights that packed tensors stand for. transformers knows bitsandbytes' tensors alone."""
    count = original(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
    return count if only_trainable else count + uncounted_weights(model)


def _load_adapter(model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse an adapter of which a part would be left out."""
    info = original(*args, **kwargs)
    if is_quantized(model):
        refuse_lost(model, [key for key in info.unexpected_keys if ".lora_" in key])
    return info


def refuse_lost(model: nn.Module, lost: list[str]) -> None:
    """Raise `ValueError` if there are tensors of an adapter that have no place in a model."""
    if lost:
        raise ValueError(
            f"{len(lost)} tensors of the adapter have no place in the {model.config.model_type} model, such as "
            f"{min(lost)}: the adapter would do only a part of what it was trained to do. Load it on the model that it "
            "was made for, or correct the targets in its adapter_config.json"
        )


def _keeps_weights(model: nn.Module) -> bool:
    """Not of models that accelerate offloads, whose weights do not fit on the device together: copies would stay."""
    hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
    hooks += [hook for outer in hooks for hook in getattr(outer, "hooks", ())]
    return is_quantized(model) and not any(getattr(hook, "offload", False) for hook in hooks)


# ---- TRL ------------------------------------------------------------------------------------------------------------


def loading_trainer() -> tuple[Any, str | None]:
    """Return the TRL trainer that is loading a model now, and from which name or folder; two `None` outside of one."""
    frame, source = sys._getframe(1), None
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("trl."):
            source = frame.f_locals.get("model_id", source)
            if "self" in frame.f_locals:
                return frame.f_locals["self"], source
        frame = frame.f_back
    return None, None


def check_trainer() -> None:
    """Raise `ValueError` where a trainer of TRL itself loads or gets a quantized policy and would push it to vLLM."""
    trainer, _ = loading_trainer()
    names = {cls.__name__ for cls in type(trainer).__mro__}
    ours = next((f"MXFP4{name}" for name in ("AsyncGRPOTrainer", "GRPOTrainer") if name in names), None)
    pushes = "AsyncGRPOTrainer" in names or getattr(getattr(trainer, "args", None), "use_vllm", False)
    if pushes and not any(name.startswith("MXFP4") for name in names):
        raise ValueError(
            f"trl's {type(trainer).__name__} would push the master weights of this policy to vLLM, which would sample "
            f"from them unquantized; {f'use hf_mxfp4.rl.{ours} in its place' if ours else 'set use_vllm=False'}"
        )


def policy_scheme() -> MXFP4RLConfig | None:
    """Return the scheme of the policy whose TRL trainer is loading a reference from the same place, if one is."""
    trainer, source = loading_trainer()
    config = getattr(getattr(trainer, "model", None), "config", None)
    scheme = getattr(config, "quantization_config", None)
    if not isinstance(scheme, MXFP4RLConfig) or config.name_or_path != str(source):
        return None
    return scheme


def watch_references() -> None:
    """Have transformers ask [`policy_scheme`] for models that are loaded without a scheme."""
    choose = modeling_utils.get_hf_quantizer
    if getattr(choose, "asks_policy_scheme", False):
        return

    @functools.wraps(choose)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        if quantization_config is None and getattr(config, "quantization_config", None) is None:
            quantization_config = copy.deepcopy(policy_scheme())
            if quantization_config is not None:
                get_logger().info("the reference gets the scheme of the policy: %s", quantization_config.describe())
        return choose(config, quantization_config, *args, **kwargs)

    get_hf_quantizer.asks_policy_scheme = True  # type: ignore[attr-defined]
    modeling_utils.get_hf_quantizer = get_hf_quantizer
