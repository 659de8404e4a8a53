# SPDX-License-Identifier: Apache-2.0
"""Rotations by Hadamard matrices: the matrix itself, its inverse, and what it does to outliers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mxfp4.numerics import ROTATION_SIZES, random_signs, rotate, unrotate


def sylvester(size):
    """H of Sylvester's construction, by Kronecker products."""
    matrix = np.array([[1.0]])
    while len(matrix) < size:
        matrix = np.kron([[1.0, 1.0], [1.0, -1.0]], matrix)
    return torch.from_numpy(matrix)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("size", ROTATION_SIZES)
def test_is_the_block_diagonal_sylvester_matrix(size):
    x = randn(3, 2 * size)
    expected = torch.cat([block @ sylvester(size) / size**0.5 for block in x.split(size, dim=-1)], dim=-1)
    assert torch.allclose(rotate(x, size), expected, atol=1e-12)


@pytest.mark.parametrize("size", ROTATION_SIZES)
@pytest.mark.parametrize("signed", [False, True], ids=["deterministic", "random"])
def test_products_of_rotated_operands_are_unchanged(size, signed):
    x, w = randn(5, 256, seed=1), randn(7, 256, seed=2)
    signs = random_signs(256, seed=3) if signed else None
    product = rotate(x, size, signs=signs) @ rotate(w, size, signs=signs).T
    assert torch.allclose(product, x @ w.T, atol=1e-10)


@given(size=st.sampled_from(ROTATION_SIZES), blocks=st.integers(1, 3), seed=st.integers(0, 999), signed=st.booleans())
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_inverse_and_norm(size, blocks, seed, signed):
    x = randn(2, blocks * size, seed=seed)
    signs = random_signs(blocks * size, seed) if signed else None
    rotated = rotate(x, size, signs=signs)
    assert torch.allclose(unrotate(rotated, size, signs=signs), x, atol=1e-12)
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_axis_and_dtype(dtype):
    x = randn(32, 5, 3).to(dtype)
    along_first = rotate(x, 32, axis=0)
    assert along_first.dtype == dtype and along_first.shape == x.shape
    assert torch.equal(along_first, rotate(x.movedim(0, -1), 32).movedim(-1, 0))


def test_signs_are_a_function_of_the_seed():
    assert torch.equal(random_signs(512, 1), random_signs(512, 1))
    assert not torch.equal(random_signs(512, 1), random_signs(512, 2))
    assert set(random_signs(512, 1).tolist()) == {-1.0, 1.0}
    state = torch.get_rng_state()
    random_signs(8, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="size=32 does not divide the 40 elements"):
        rotate(torch.ones(2, 40), 32)
    with pytest.raises(ValueError, match=r"signs has shape \(3,\)"):
        rotate(torch.ones(2, 32), 32, signs=torch.ones(3))
    with pytest.raises(TypeError, match="torch.int64"):
        rotate(torch.ones(2, 32, dtype=torch.int64), 32)
