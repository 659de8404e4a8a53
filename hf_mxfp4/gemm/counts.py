# SPDX-License-Identifier: Apache-2.0
"""How often weights were quantized for products, counted where that is done."""

from collections import Counter

import torch


#: By product, matrices since the process began.
_counts: Counter[str] = Counter()


def count_weight(weight: torch.Tensor, gemm: str = "fprop") -> None:
    """Count one quantization of a weight ``[N, K]``, or of those of all experts, for a product: ``"fprop"``, or
    ``"dgrad"`` where that one takes another operand than the forward product does."""
    _counts[gemm] += 1 if weight.dim() == 2 else weight.shape[0]


def weight_quantizations() -> Counter[str]:
    """Return by product how many weight matrices were quantized since the process began; each expert's is one."""
    return Counter(_counts)
