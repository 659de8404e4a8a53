# SPDX-License-Identifier: Apache-2.0
"""Selective outlier fallback of activations: one delayed threshold per layer, moved between steps.

The threshold is plain state of a process and not shared: in every process of a job it starts from the first activation
that the layer sees. Training checkpoints of [`hf_mxfp4.rl.ExactResumeMixin`] hold that of each process; a model that is
saved by itself does not.
"""

import math

from torch import nn

from ..numerics import FallbackThreshold
from ..numerics.fallback import fetch_counts


def fallback_thresholds(model: nn.Module) -> list[FallbackThreshold]:
    """The thresholds of all layers of ``model`` that select activation blocks for outlier fallback."""
    return list(named_fallback_thresholds(model).values())


def named_fallback_thresholds(model: nn.Module) -> dict[str, FallbackThreshold]:
    """Return [`fallback_thresholds`] by the names of the layers, and of each projection of experts."""
    found = {}
    for name, module in model.named_modules():
        found[name] = getattr(module, "fallback_threshold", None)
        for projection, threshold in getattr(module, "fallback_thresholds", {}).items():
            found[f"{name}.{projection}"] = threshold
    return {name: threshold for name, threshold in found.items() if isinstance(threshold, FallbackThreshold)}


def update_fallback_thresholds(model: nn.Module) -> float:
    """Move every layer's threshold by the rate measured since the last call. To be called after each optimizer step:
    nothing else moves them, so that all forward passes of a step, recomputed ones too, quantize alike.

    Returns:
        The measured rate, averaged over the layers that computed anything; NaN when none did.

    Raises `ValueError` when no layer of ``model`` selects activation blocks for outlier fallback.
    """
    thresholds = fallback_thresholds(model)
    if not thresholds:
        raise ValueError(
            f"{type(model).__name__} has no layer with selective outlier fallback of activations; "
            "set outlier_fallback_rate in MXFP4RLConfig"
        )
    fetch_counts(thresholds)
    rates = [rate for rate in (threshold.update() for threshold in thresholds) if not math.isnan(rate)]
    return sum(rates) / len(rates) if rates else math.nan
