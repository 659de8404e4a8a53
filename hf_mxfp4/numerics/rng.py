# SPDX-License-Identifier: Apache-2.0
"""Uniform random numbers for stochastic rounding: of PyTorch's generators, or counted.

A counted number is a function of a 64-bit seed and of the place of an element alone, hence the same on every device,
backend and tile shape. It is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): of
an element in row ``r`` and column ``c`` of ``[..., K]`` (rows counted over all leading axes, blocks along the last one)
the key is ``(seed mod 2**32, seed >> 32)``, the counter ``(n mod 2**32, n >> 32, draw, 0)`` with
``n = r * ceil(K / 4) + c // 4``, and the number is the upper 24 bits of word ``c mod 4`` over ``2**24``. ``draw`` is 0
in the first rounding of an element and 1 in that of the residual of outlier fallback.
"""

import torch


#: Where random numbers come from: a generator, a seed for counted ones, or `None` for PyTorch's own generator.
NoiseSource = torch.Generator | int | None

# Philox4x32-10: rounds, the multipliers of counters 0 and 2, and what is added to both halves of the key each round.
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
#: Mask of the lower 32 bits.
_WORD = 0xFFFFFFFF
#: Counters are run through all rounds in portions of this many, which stay in the processor's cache.
_PORTION = 1 << 14


def check_seed(rounding: str, seed: int | None) -> None:
    """Raise `TypeError` or `ValueError` for a seed that is no integer in 0..2**64 - 1, or that has no effect."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {type(seed).__name__}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} must be in 0..2**64 - 1")
    if rounding != "stochastic":
        raise ValueError(f"seed has no effect on rounding={rounding!r}")


def counted_uniform(
    shape: tuple[int, ...], seed: int, draw: int, device: torch.device | str, places: torch.Tensor | None = None
) -> torch.Tensor:
    """Return counted numbers, multiples of ``2**-24`` in [0, 1), float32 ``[..., K]``. ``places``, int64 on ``device``,
    are the rows of a larger matrix that these are; by default its first."""
    length = shape[-1]
    n_rows = 1
    for size in shape[:-1]:
        n_rows *= size
    # A counter gives the numbers of four neighbours.
    per_row = -(-length // 4)
    n_counters = n_rows * per_row
    out = torch.empty(n_counters, 4, dtype=torch.float32, device=device)
    portion = max(1, n_counters)
    if torch.device(device).type == "cpu":
        portion = _PORTION
    for start in range(0, n_counters, portion):
        numbers = out[start : start + portion]
        counter = torch.arange(start, start + numbers.shape[0], dtype=torch.int64, device=device)
        if places is not None:
            counter = places[counter // per_row] * per_row + counter % per_row
        for column, word in zip(numbers.unbind(1), _philox(counter, seed, draw), strict=True):
            column.copy_(word >> 8)
    # The last counter of a row may give more numbers than it has elements.
    return out.mul_(2.0**-24).view(n_rows, per_row * 4)[:, :length].reshape(shape)


def _philox(counter: torch.Tensor, seed: int, draw: int) -> tuple[torch.Tensor, ...]:
    """Return four words of 32 bits (in int64) for each counter (int64, non-negative)."""
    c0 = counter & _WORD
    c1 = counter >> 32
    c2 = torch.full_like(counter, draw)
    c3 = torch.zeros_like(counter)
    k0 = seed & _WORD
    k1 = seed >> 32
    for _ in range(_ROUNDS):
        # Products of 64 bits wrap into the sign; all their bits are there.
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0 = ((second >> 32) & _WORD).bitwise_xor_(c1).bitwise_xor_(k0)
        c1 = second.bitwise_and_(_WORD)
        c2 = ((first >> 32) & _WORD).bitwise_xor_(c3).bitwise_xor_(k1)
        c3 = first.bitwise_and_(_WORD)
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3
