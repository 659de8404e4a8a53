# SPDX-License-Identifier: Apache-2.0
"""Which copies of quantized weights a rollout by transformers keeps."""

import contextlib
from collections import Counter

from torch import nn

from ...layers import MXFP4Linear, cached_weights, uncached_weights


def rollout_context(kept: bool, form: str) -> contextlib.AbstractContextManager[None]:
    """For `cache_rollout_weights` and `rollout_weights` of [`MXFP4GRPOConfig`]."""
    return cached_weights(form) if kept else uncached_weights()


def describe_rollout_weights(model: nn.Module, kept: bool, form: str) -> str:
    """What [`rollout_context`] keeps of a model's trainable linear layers, counted."""
    if not kept:
        return "no copies"
    layers = [module for module in model.modules() if isinstance(module, MXFP4Linear)]
    counts = Counter(layer.rollout_form(layer.weight, form) for layer in layers)
    return f"copies of {counts['packed']} linear layers packed, of {counts['dense']} dense"
