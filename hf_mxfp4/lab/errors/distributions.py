# SPDX-License-Identifier: Apache-2.0
"""Random data to try schemes on."""

from collections.abc import Callable

import torch


#: Elements per row; every row has its own standard deviation.
ROW = 1024
#: Of a row of "outliers": channels that are this much larger than the rest.
OUTLIER_CHANNELS, OUTLIER_FACTOR = 8, 30.0


def _outliers(shape: tuple[int, int], df: float) -> torch.Tensor:
    x = torch.randn(shape)
    x[:, torch.randperm(shape[1])[:OUTLIER_CHANNELS]] *= OUTLIER_FACTOR
    return x


#: Unscaled draws ``(shape, degrees of freedom) -> float32``.
DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], float], torch.Tensor]] = {
    "gaussian": lambda shape, df: torch.randn(shape),
    "laplace": lambda shape, df: torch.distributions.Laplace(0.0, 1.0).sample(shape),
    "student-t": lambda shape, df: torch.distributions.StudentT(df).sample(shape),
    "uniform": lambda shape, df: torch.rand(shape) * 2 - 1,
    "outliers": _outliers,
}


def sample(distribution: str, elements: int, seed: int, df: float = 4.0) -> torch.Tensor:
    """Float32 ``[rows, 1024]`` of at least ``elements`` elements.

    The standard deviations of the rows are log-uniform over one octave, which averages over where block maxima fall
    between two powers of two. ``"outliers"`` has 8 of the 1024 channels 30 times as large as the others.

    Args:
        distribution: a key of [`DISTRIBUTIONS`].
        df: degrees of freedom of ``"student-t"``.
    """
    shape = (-(-elements // ROW), ROW)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        spread = torch.exp2(torch.rand(shape[0], 1))
        return DISTRIBUTIONS[distribution](shape, df) * spread
