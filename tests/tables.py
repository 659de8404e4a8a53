# SPDX-License-Identifier: Apache-2.0
"""Tables of scale rules, macro blocks and configurations, from which tests choose their cases.

A file selects the entries that it needs by name, with [`some`]. [`pairwise`] reduces a product of options to few cases
in which every two values of different options still meet, because most faults of combined options need no more than two
of them (Kuhn, Wallace and Gallo, IEEE Transactions on Software Engineering 30(6), 2004).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch

from hf_mxfp4.ops import multiply_fp8, to_fp8
from hf_mxfp4.presets import PRESETS
from mxfp4_kernels.scale_rules import SCALE_RULES, ScaleRule


Entry = TypeVar("Entry")
#: Places of values, one for each option.
Places = tuple[int, ...]

#: Every scale rule: three that round the largest magnitude, and one that searches.
RULES = SCALE_RULES
ROUNDING_RULES = tuple(rule.value for rule in ScaleRule if not rule.least_squares)

#: `macro_block` and `macro_search` of one tensor: every size, every search.
MACROS = (
    (None, "static"), (32, "static"), (128, "static"), (64, "dynamic"), (128, "dynamic"), (256, "dynamic"),
    (128, "block_mantissas"), (128, "block_mantissas_fp8"), ("row", "static"), ("row", "dynamic"),
)  # fmt: skip
#: `outlier_fallback` of one tensor.
ALPHAS = (None, 0.5, 1.0)


#: Plain MXFP4, without macro blocks.
PLAIN = {"preset": "w4a4", "macro_block": None}

#: `w4a4` with the whole residual of both operands.
RESIDUALS = {"preset": "w4a4", "outlier_fallback": 1.0}
#: `w4a4` whose output gradients are in E4M3.
FP8_GRADIENTS = {"preset": "w4a4", "dgrad": {"grad": "fp8"}, "wgrad": {"grad": "fp8"}}
_TILES = "even+mbs128-blockwise+of1+32x32"

#: Options of `MXFP4RLConfig`.
CONFIGS = {
    "default": {},
    "plain": PLAIN,
    "floor": {**PLAIN, "scale_rule": "floor"},
    "even": {**PLAIN, "scale_rule": "even"},
    "mse": {**PLAIN, "scale_rule": "mse"},
    **{preset: {"preset": preset} for preset in PRESETS},
    "nvfp4": {"fprop": {"x": "nvfp4", "weight": "nvfp4"}},
    "w4a16 plain": {"preset": "w4a16", "macro_block": None},
    "mxfp8": {"fprop": {"x": "mxfp8"}},
    # Macro blocks.
    "static": {"preset": "w4a4", "macro_search": "static"},
    "32 static": {**RESIDUALS, "macro_block": 32, "macro_search": "static"},
    "row static": {"preset": "w4a4", "macro_block": "row", "macro_search": "static"},
    "mse row": {**RESIDUALS, "scale_rule": "mse", "macro_block": "row"},
    "mse row, no fallback": {"preset": "w4a4", "scale_rule": "mse", "macro_block": "row"},
    "block_mantissas": {"preset": "w4a16", "macro_search": "block_mantissas"},
    "block_mantissas_fp8": {"preset": "w4a4", "macro_search": "block_mantissas_fp8"},
    # Fallback.
    "fallback 1": {**RESIDUALS, "macro_block": None},
    "fallback 0.5": {"preset": "w4a4", "outlier_fallback": 0.5},
    "fallback of weights": {**RESIDUALS, "fprop": {"x": "even+mbs128-blockwise"}},
    "fallback of activations": {**RESIDUALS, "fprop": {"weight": "even+mbs128-blockwise"}},
    # Tiles.
    "tiles": {**RESIDUALS, "fprop": {"weight": _TILES}},
    "plain tiles": {**PLAIN, "fprop": {"weight": "rceil+32x32"}},
    "row tiles": {**RESIDUALS, "macro_block": "row", "fprop": {"weight": "even+mbsrow-dynamic+of1+32x32"}},
    # Backward products.
    "rotated, own wgrad": {
        **PLAIN,
        "fprop": {"rotation": "deterministic-32"},
        "wgrad": {"grad": "rceil", "x": "rceil"},
    },
    "random": {
        "fprop": {"x": "rceil+stochastic", "weight": "rceil+stochastic", "rotation": "random-16"},
        "dgrad": {"grad": "rceil+stochastic"},
        "wgrad": {"grad": "rceil+stochastic", "x": "rceil", "rotation": "random-32"},
    },
    "random wgrad": {"wgrad": {"grad": "rceil", "x": "rceil", "rotation": "random-16"}},
    "fp8 gradients": FP8_GRADIENTS,
    "full": {"dgrad": {"weight": "full"}, "wgrad": {"x": "full"}},
    # Which layers, and how they are computed.
    "eager": {"backend": "eager", "preset": "w4a4"},
    "skips": {"modules_to_not_convert": ["layers.0.mlp", "re:.*o_proj"]},
}

#: Options of products.
GEMMS = {"dgrad": {"grad": "rceil+stochastic"}, "wgrad": {"grad": "fp8", "x": "full", "rotation": "random-32"}}


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def some(table: Mapping[str, Entry], *names: str) -> dict[str, Entry]:
    """The named entries of a table, in that order."""
    return {name: table[name] for name in names}


def pairwise(*options: Sequence, allowed: Callable[..., bool] | None = None) -> list[tuple]:
    """Cases, in the order of the product, with every pair of values that an allowed case has; always the same.

    ``options``: the values of each option. ``allowed``: whether a case, given as arguments, exists.
    """
    return [_values(options, places) for places in _covering(_existing(options, allowed))]


def pairwise_params(*options: Sequence, allowed: Callable[..., bool] | None = None) -> list[Any]:
    """Parameters of a test: the pairwise cases in every run, the rest of the product in the long one."""
    existing = _existing(options, allowed)
    few = set(_covering(existing))
    return [pytest.param(*_values(options, p), marks=() if p in few else pytest.mark.large) for p in existing]


def _existing(options: Sequence[Sequence], allowed: Callable[..., bool] | None) -> list[Places]:
    product = itertools.product(*(range(len(values)) for values in options))
    return [places for places in product if allowed is None or allowed(*_values(options, places))]


def _values(options: Sequence[Sequence], places: Places) -> tuple:
    return tuple(values[place] for values, place in zip(options, places, strict=True))


def _covering(cases: list[Places]) -> list[Places]:
    """Greedily, each time the case with most of the pairs that are missing; the first of equals."""
    bits: dict[tuple, int] = {}
    masks = []
    for places in cases:
        size = min(2, len(places))  # a single option has no pairs
        met = itertools.combinations(enumerate(places), size)
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in met))
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: (masks[number] & missing).bit_count())
        chosen.append(best)
        missing &= ~masks[best]
    return [cases[number] for number in sorted(chosen)]


def _has_fp8_on_cpu() -> bool:
    """Ask the operator itself: what the product says of it, `HAS_FP8_ON_CPU`, is under test."""
    ones = to_fp8(torch.ones(16, 16))
    try:
        return multiply_fp8(ones, ones, None, None, torch.float32) is not None
    except NotImplementedError:  # what PyTorch 2.11 raises for an operator without a kernel on the CPU
        return False


needs_fp8_on_cpu = pytest.mark.skipif(not _has_fp8_on_cpu(), reason="this PyTorch has no FP8 products on the CPU")
