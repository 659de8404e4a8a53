# SPDX-License-Identifier: Apache-2.0
"""Patches of transformers, TRL and PEFT.

Each says what it changes, why no extension point of the library does, and what upstream would make it go. All other
code of this package uses what the libraries document: their tables of quantizers and tuners, methods of `HfQuantizer`,
and PEFT's custom modules for LoRA. Not here are the entry in transformers' tables before these are imported
([`hf_mxfp4.registration`]), and how quantized models are saved ([`hf_mxfp4.checkpoint`]).
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn
from transformers import modeling_utils

from .._logging import get_logger
from ..checkpoint import is_quantized
from ..config import MXFP4RLConfig
from ..ops import WeightCache, cached_weights
from ..report import uncounted_weights
from .continuous_batching import prepare_manager
from .decoding_guards import compiled_step, skipped_guards


#: An attribute of what was patched: nothing is patched twice.
_MARK = "is_patched_by_hf_mxfp4"


def patch_method(cls: type, name: str, around: Callable[..., Any]) -> None:
    """Have a method of a class call ``around(object, original, ...)``, if the class has the method."""
    if not hasattr(cls, name) or getattr(getattr(cls, name), _MARK, False):
        return
    own = vars(cls).get(name)

    @functools.wraps(getattr(cls, name))
    def method(self, *args, **kwargs):
        # Looked up at each call where it is inherited: others replace the method of a base class too.
        if own is None:
            original = getattr(super(cls, self), name)
        else:
            original = functools.partial(own, self)
        return around(self, original, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(cls, name, method)


def patch_function(module: ModuleType, name: str, around: Callable[..., Any]) -> None:
    """Have a function of a module call ``around(original, ...)``."""
    original = getattr(module, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def function(*args, **kwargs):
        return around(original, *args, **kwargs)

    setattr(function, _MARK, True)
    setattr(module, name, function)


# ---- transformers ---------------------------------------------------------------------------------------------------


def patch_model_class(cls: type) -> None:
    """Make methods of a class of models do what its quantized models need. Other models of the class do as before.

    * `generate` keeps quantized weights while it runs, as nothing changes them (see [`hf_mxfp4.cached_weights`]).
      A quantizer is not told when generation begins and ends. Upstream: none known.
    * `generate_batch` does too, and its CUDA graphs read what is kept.
    * `init_continuous_batching` makes a manager whose thread runs under the autocast of the caller, without graphs
      where these are not possible; see [`hf_mxfp4.integrations.continuous_batching`].
    * `get_compiled_call`, within `generate`, returns a step that skips guards after its warm-up (see
      [`hf_mxfp4.integrations.decoding_guards`]). transformers has no option for it. Upstream: none known.
    * `num_parameters` counts the weights that packed tensors stand for. transformers knows bitsandbytes' tensors alone
      (huggingface/transformers#26132). Upstream: none known.
    * `load_adapter` refuses an adapter of which a part would be left out, about which transformers only warns.
      Upstream: none known.
    """
    patch_method(cls, "generate", _generate)
    patch_method(cls, "generate_batch", _generate_batch)
    patch_method(cls, "init_continuous_batching", _init_continuous_batching)
    patch_method(cls, "get_compiled_call", _get_compiled_call)
    patch_method(cls, "num_parameters", _num_parameters)
    patch_method(cls, "load_adapter", _load_adapter)


def _generate(model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _keeps_weights(model):
        return original(*args, **kwargs)
    with cached_weights(model), skipped_guards(model, args, kwargs):
        return original(*args, **kwargs)


def _generate_batch(model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Graphs of a persistent manager are replayed when what this call keeps is gone.
    is_persistent = inspect.signature(original).bind(*args, **kwargs).arguments.get("persistent_manager", False)
    if not _keeps_weights(model) or is_persistent:
        return _generate(model, original, *args, **kwargs)
    cache = WeightCache(model)
    with cache.open(), cache.serving_graphs():
        return original(*args, **kwargs)


def _init_continuous_batching(model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    manager = original(*args, **kwargs)
    if is_quantized(model):
        prepare_manager(manager)
    return manager


def _get_compiled_call(model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return compiled_step(original(*args, **kwargs))


def _keeps_weights(model: nn.Module) -> bool:
    """Return whether quantized weights fit on the device together, unlike those of a model that accelerate offloads."""
    if not is_quantized(model):
        return False
    hooks = []
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        hooks += [hook, *getattr(hook, "hooks", ())]  # of a SequentialHook
    return not any(getattr(hook, "offload", False) for hook in hooks)


def _num_parameters(
    model: nn.Module, original: Callable[..., int], only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    count = original(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
    if only_trainable:  # packed weights are frozen
        return count
    return count + uncounted_weights(model)


def _load_adapter(model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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


# ---- TRL ------------------------------------------------------------------------------------------------------------


def patch_reference_loading() -> None:
    """Have transformers give a reference model that TRL loads the scheme of the policy.

    DPO and other trainers load the reference from the policy's name without its `quantization_config`, if the policy
    was passed as a model (huggingface/trl#6312 refuses a scheme passed to the trainer then). Upstream: none known.
    """
    patch_function(modeling_utils, "get_hf_quantizer", _get_hf_quantizer)


def _get_hf_quantizer(
    original: Callable[..., Any], config: Any, quantization_config: Any, *args: Any, **kwargs: Any
) -> Any:
    if quantization_config is None and getattr(config, "quantization_config", None) is None:
        quantization_config = copy.deepcopy(_policy_scheme())
        if quantization_config is not None:
            get_logger().info("the reference gets the scheme of the policy: %s", quantization_config.describe())
    return original(config, quantization_config, *args, **kwargs)


def _policy_scheme() -> MXFP4RLConfig | None:
    """Return the scheme of the policy whose TRL trainer is loading a reference from the same place, if one is."""
    trainer, source = _loading_trainer()
    config = getattr(getattr(trainer, "model", None), "config", None)
    scheme = getattr(config, "quantization_config", None)
    if not isinstance(scheme, MXFP4RLConfig) or config.name_or_path != str(source):
        return None
    return scheme


def _loading_trainer() -> tuple[Any, str | None]:
    """Return the TRL trainer that is loading a model now, and from which name or folder; two `None` outside of one.

    It is found on the call stack: TRL passes nothing of itself to `from_pretrained`. Upstream: none known.
    """
    source = None
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("trl."):
            source = frame.f_locals.get("model_id", source)
            if "self" in frame.f_locals:
                return frame.f_locals["self"], source
        frame = frame.f_back
    return None, None


def check_trainer() -> None:
    """Raise `ValueError` where a trainer of TRL itself loads or gets a quantized policy and would push it to vLLM.

    TRL asks no quantizer before it pushes weights, so the trainer is found on the call stack. Upstream: none known.
    """
    trainer, _ = _loading_trainer()
    names = {cls.__name__ for cls in type(trainer).__mro__}
    pushes = "AsyncGRPOTrainer" in names or getattr(getattr(trainer, "args", None), "use_vllm", False)
    if pushes and not any(name.startswith("MXFP4") for name in names):
        advice = "set use_vllm=False"
        for name in ("GRPOTrainer", "AsyncGRPOTrainer"):
            if name in names:
                advice = f"use hf_mxfp4.rl.MXFP4{name} in its place"
        raise ValueError(
            f"trl's {type(trainer).__name__} would push the master weights of this policy to vLLM, which would sample "
            f"from them unquantized; {advice}"
        )


# ---- PEFT -----------------------------------------------------------------------------------------------------------


def patch_tuners(check_method: Callable[..., None], check_merge: Callable[..., None]) -> None:
    """Have all tuners call ``check_method(tuner, model, config)`` before they attach an adapter, and
    ``check_merge(tuner)`` before they merge.

    PEFT's extension point for layers of others is LoRA's alone (huggingface/peft#1875). Other methods would train
    packed bytes or merge into them, without an error. Some compute from weights in `__init__`, before they attach.
    Upstream: none known.
    """
    from peft import PeftConfig
    from peft.tuners.tuners_utils import BaseTuner

    def make(tuner, original, model, peft_config, adapter_name, *args, **kwargs):
        config = peft_config if isinstance(peft_config, PeftConfig) else peft_config[adapter_name]
        check_method(tuner, model, config)
        return original(model, peft_config, adapter_name, *args, **kwargs)

    def inject(tuner, original, model, adapter_name, *args, **kwargs):
        check_method(tuner, model, tuner.peft_config[adapter_name])
        return original(model, adapter_name, *args, **kwargs)

    def merge(tuner, original):
        check_merge(tuner)
        return original()

    patch_method(BaseTuner, "__init__", make)
    patch_method(BaseTuner, "inject_adapter", inject)
    patch_method(BaseTuner, "_check_merge_allowed", merge)


def patch_counts() -> None:
    """Have PEFT count the weights that packed tensors stand for: it knows bitsandbytes' tensors alone
    (huggingface/peft#733). Upstream: none known."""
    from peft import PeftMixedModel, PeftModel

    def count(model, original):
        trainable, total = original()
        return trainable, total + uncounted_weights(model)

    for cls in (PeftModel, PeftMixedModel):
        patch_method(cls, "get_nb_trainable_parameters", count)


def change_class(config: Any, subclass: type) -> None:
    """Make a config of PEFT one of a subclass, in place, so that it saves the fields of the subclass too.

    PEFT holds several references to a config that the user made, and saves the fields of its class. Upstream: none
    known.
    """
    config.__class__ = subclass
