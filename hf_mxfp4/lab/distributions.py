# SPDX-License-Identifier: Apache-2.0
"""Random data to try schemes on."""

import torch


#: Elements per row; every row has its own standard deviation.
ROW = 1024


def sample(distribution: str, elements: int, seed: int, df: float = 4.0) -> torch.Tensor:
    """Draw float32 ``[rows, 1024]`` of at least ``elements`` elements.

    The standard deviations of the rows are log-uniform over one octave, which averages over where block maxima fall
    between two powers of two.

    Args:
        distribution: ``"gaussian"``, ``"laplace"``, ``"student-t"``, ``"uniform"``, or ``"outliers"``, which has 8 of
            the 1024 channels 30 times as large as the others.
        df: degrees of freedom of ``"student-t"``.
    """
    shape = (-(-elements // ROW), ROW)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        spread = torch.exp2(torch.rand(shape[0], 1))
        return _draw(distribution, shape, df) * spread


def _draw(distribution: str, shape: tuple[int, int], df: float) -> torch.Tensor:
    match distribution:
        case "laplace":
            return torch.distributions.Laplace(0.0, 1.0).sample(shape)
        case "student-t":
            return torch.distributions.StudentT(df).sample(shape)
        case "uniform":
            return torch.rand(shape) * 2 - 1
    x = torch.randn(shape)
    if distribution == "outliers":
        x[:, torch.randperm(ROW)[:8]] *= 30
    return x
