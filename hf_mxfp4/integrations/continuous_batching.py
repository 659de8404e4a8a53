# SPDX-License-Identifier: Apache-2.0
"""What the manager of transformers' continuous batching (`generate_batch`) must know of quantized models.

It generates in a thread of its own, and autocast belongs to a thread. transformers passes inference mode on to that
thread, and not autocast. Upstream: none known.
"""

import functools
from typing import Any

import torch
from torch import nn

from .._logging import get_logger
from ..layers import MXFP4Experts, MXFP4PackedExperts
from ..utils import replaced_method


_EXPERTS = (MXFP4Experts, MXFP4PackedExperts)


def prepare_manager(manager: Any) -> None:
    """Make a new `ContinuousBatchingManager` run its model, in whichever thread, under the autocast that is on now, and
    without CUDA graphs where experts are quantized, whose products may wait for the device."""
    config = manager.continuous_batching_config
    if any(config.cuda_graph_booleans) and any(isinstance(m, _EXPERTS) for m in manager.model.modules()):
        get_logger().info("continuous batching of quantized experts runs without CUDA graphs")
        config.use_cuda_graph = (False, False)
    kind = manager.model.device.type
    if torch.is_autocast_enabled(kind) and not isinstance(manager.model, _AutocastModel):
        manager.model = _AutocastModel(manager.model, torch.get_autocast_dtype(kind))


class _AutocastModel:
    """A model whose forward pass runs under autocast, with keys and values in the dtype of autocast. All else is the
    model's.

    Attributes:
        dtype: that of autocast, in which the manager keeps keys and values.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        vars(self).update(_model=model, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __call__(self, **batch: Any) -> Any:
        # Rotary embeddings leave keys in float32 where norms have float32 weights.
        cache = batch["cache"]
        update = functools.partial(_update, cache.update, self.dtype)
        # A CUDA graph must not read casts that autocast has kept from an earlier pass of any thread, nor keep its own.
        torch.clear_autocast_cache()
        try:
            with replaced_method(cache, "update", update), torch.autocast(self._model.device.type, self.dtype):
                return self._model(**batch)
        finally:
            torch.clear_autocast_cache()


def _update(update: Any, dtype: torch.dtype, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any):
    """Call `PagedAttentionCache.update` with keys and values in one dtype."""
    return update(keys.to(dtype), values.to(dtype), *args, **kwargs)
