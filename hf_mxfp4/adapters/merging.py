# SPDX-License-Identifier: Apache-2.0
"""What PEFT layers on packed weights share once adapters are merged into them."""

import warnings

import torch
from torch import nn

from .merge_report import MergeError


class MergesIntoPacked:
    """Mixin before a PEFT layer whose `merge` keeps the packed tensors from before the first merge in ``_unmerged``.

    Attributes:
        merge_error: what packing cost in the last merge; `None` while nothing is merged.
        unload_dtype: when set, `merge_and_unload` makes this layer a plain one of that dtype instead of packing.
    """

    merge_error: MergeError | None = None
    unload_dtype: torch.dtype | None = None
    _unmerged: dict[str, nn.Parameter | None] | None = None

    def unmerge(self) -> None:
        """Put back the tensors that the layer had before the first merge: the same bits."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base = self.get_base_layer()
        for name, parameter in (self._unmerged or {}).items():
            now = getattr(base, name)
            if parameter is not None and parameter.device != now.device:
                parameter = nn.Parameter(parameter.to(now.device), parameter.requires_grad)
            setattr(base, name, parameter)
        self.merged_adapters = []
        self._unmerged = self.merge_error = None

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The layer without adapters, for PEFT's `unload` and `merge_and_unload`."""
        if not merge:
            return self.get_base_layer()
        if self.unload_dtype is not None:
            return self.to_plain(self.unload_dtype, adapter_names)
        self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        return self.get_base_layer()
