# SPDX-License-Identifier: Apache-2.0
"""Names of an earlier version, in which selective outlier fallback had state; to be removed in the next release."""

from typing import NoReturn

from torch import nn


def fallback_thresholds(model: nn.Module) -> dict[str, float]:
    """Return an empty dictionary: blocks are selected in each row, without thresholds."""
    return {}


def update_fallback_thresholds(model: nn.Module) -> NoReturn:
    """Raise `RuntimeError`: there is nothing to update."""
    raise RuntimeError(
        "selective outlier fallback selects the blocks of each row and has no thresholds; remove this call"
    )
