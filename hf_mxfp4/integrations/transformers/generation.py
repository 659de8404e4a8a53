# SPDX-License-Identifier: Apache-2.0
"""`generate` of quantized models: weights are quantized once per call, not once per token."""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ...checkpoint import is_quantized
from ...gemm import cached_weights


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def wrap_generation(cls: type["PreTrainedModel"]) -> None:
    """Make `generate` of the quantized models of a class keep quantized weights while a call lasts (see
    [`hf_mxfp4.cached_weights`]): nothing changes them inside.

    Wraps the method of the class, once, as [`hf_mxfp4.checkpoint.save.wrap_saving`] does; other models of the
    class generate as ever. A class that cannot generate is left alone.
    """
    if hasattr(cls, "generate") and not getattr(cls.generate, "keeps_quantized_weights", False):
        cls.generate = _wrap(cls)


def _wrap(cls: type) -> Callable[..., Any]:
    own = vars(cls).get("generate")

    @functools.wraps(cls.generate)
    def generate(self, *args, **kwargs):
        # Looked up at each call where it is inherited: others replace the method of a base class too.
        original = super(cls, self).generate if own is None else functools.partial(own, self)
        with cached_weights(self) if _keeps_weights(self) else contextlib.nullcontext():
            return original(*args, **kwargs)

    generate.keeps_quantized_weights = True
    return generate


def _keeps_weights(model: "PreTrainedModel") -> bool:
    """Not of models whose weights come to the device for one product at a time, since they do not fit there: copies
    would stay."""
    return is_quantized(model) and not any(_offloads(module) for module in model.modules())


def _offloads(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)  # accelerate's
    return any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ())))
