# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: reproducible, unbiased, only ever to a neighbour; numbers that are counted; and rotations."""

import pytest
import torch
from tables import gaussian

from hf_mxfp4 import fake_quantize as fastest
from hf_mxfp4 import numerics
from hf_mxfp4.numerics import apply_scheme, fake_quantize, random_signs, rotate


WORD = 2**32 - 1


def stochastic(x: torch.Tensor, seed: int | None, **scheme) -> torch.Tensor:
    return fake_quantize(x, rounding="stochastic", seed=seed, **scheme)


def round_stochastic(values: torch.Tensor, seed: int | None = 0) -> torch.Tensor:
    """Values ``[..., n]``, of at most 6, in blocks whose scale is 1."""
    count = -(values.shape[-1] // -31)
    blocks = torch.nn.functional.pad(values, (0, 31 * count - values.shape[-1])).unflatten(-1, (count, 31))
    blocks = torch.cat([blocks, torch.full((*blocks.shape[:-1], 1), 6.0)], dim=-1)
    return stochastic(blocks, seed)[..., :-1].flatten(-2)[..., : values.shape[-1]]


def test_the_global_generator():
    x = gaussian(8, 64, seed=0)
    torch.manual_seed(3)
    first = fake_quantize(x, rounding="stochastic")
    assert not torch.equal(first, fake_quantize(x, rounding="stochastic"))
    torch.manual_seed(3)
    assert torch.equal(first, fake_quantize(x, rounding="stochastic"))


def test_only_the_two_neighbours_are_reached():
    points = torch.tensor(sorted({sign * magnitude for magnitude in numerics.E2M1_MAGNITUDES for sign in (1, -1)}))
    y = torch.linspace(-6, 6, 385)
    draws = round_stochastic(y.expand(2000, -1))
    index = torch.searchsorted(points, y, right=True) - 1
    below = points[index]
    above = torch.where(below == y, below, points[(index + 1).clamp(max=len(points) - 1)])
    assert ((draws == below) | (draws == above)).all()
    # Both of them, where there are two and neither is rare.
    both = torch.minimum(y - below, above - y) > 0.1 * (above - below)
    assert ((draws == below).any(0) & (draws == above).any(0))[both].all()
    assert both.sum() > 250


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-24], ids=["smallest", "largest"])
def test_the_extreme_draws_stay_on_the_grid(draw, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(tuple(shape), draw))
    y = torch.tensor([0.01, 0.4, 0.9, 1.1, 1.6, 2.5, 3.5, 4.5, 5.9, 6.0])
    below = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 6.0])
    above = torch.tensor([0.5, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0, 6.0])
    for sign in (1, -1):
        assert torch.equal(round_stochastic(sign * y, None), sign * (above if draw else below))


def test_probability_is_the_distance_to_the_other_neighbour():
    y = torch.tensor([0.1, 0.6, 1.3, 1.9, 2.2, 3.75, 4.5, 5.5])
    above = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0])
    probability = torch.tensor([0.2, 0.2, 0.6, 0.8, 0.2, 0.75, 0.25, 0.75], dtype=torch.float64)
    n = 100_000
    frequency = (round_stochastic(y.expand(n, -1), 9) == above).double().mean(0)
    assert ((frequency - probability).abs() < 5 * (probability * (1 - probability) / n).sqrt()).all()


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python's integers, as Random123's `philox.h` states it."""
    (c0, c1, c2, c3) = counter
    (k0, k1) = key
    for _ in range(10):
        first = 0xD2511F53 * c0
        second = 0xCD9E8D57 * c2
        c0 = (second >> 32) ^ c1 ^ k0
        c1 = second & WORD
        c2 = (first >> 32) ^ c3 ^ k1
        c3 = first & WORD
        k0 = (k0 + 0x9E3779B9) & WORD
        k1 = (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def test_known_answers_of_random123():
    assert philox((0,) * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((WORD,) * 4, (WORD, WORD)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344
    assert philox(counter, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0xA4093822299F31D0, 2**64 - 1])
def test_numbers_are_those_of_the_definition(seed):
    for draw in (0, 1):
        actual = numerics.counted_uniform((2, 3, 9), seed, draw, "cpu")
        assert actual.dtype == torch.float32
        key = seed & WORD, seed >> 32
        words = [
            [philox((row * 3 + column // 4, 0, draw, 0), key)[column % 4] for column in range(9)] for row in range(6)
        ]
        assert actual.view(6, 9).tolist() == [[(word >> 8) * 2.0**-24 for word in row] for row in words]


SCHEMES = ["rceil", "rceil+mbs128", "rceil+of0.5", "mse+mbs64-dynamic+of0.3", "even+mbs128+of1+32x32"]
SCHEMES += ["even+mbs128-blockwise", "floor+mbsrow+of0.5"]


@pytest.mark.parametrize("text", SCHEMES)
def test_codes_give_the_values_and_a_seed_repeats(text):
    x = gaussian(35, 70, seed=0)
    scheme = numerics.parse_scheme(f"{text}+stochastic")
    for axis in (0, -1):
        values = apply_scheme(x, scheme, axis=axis, seed=9)
        assert torch.equal(values, apply_scheme(x, scheme, axis=axis, seed=9))
        packed = numerics.quantize(x, **vars(scheme), axis=axis, seed=9)
        assert torch.equal(packed.dequantize().view(torch.int32), values.view(torch.int32))
        assert not torch.equal(values, apply_scheme(x, scheme, axis=axis, seed=10))
        assert torch.equal(values, fastest(x, **vars(scheme), axis=axis, seed=9))


def test_rows_are_counted_over_all_leading_axes():
    x = gaussian(6, 70, seed=1)
    flat = fake_quantize(x, rounding="stochastic", seed=4)
    assert torch.equal(fake_quantize(x.view(2, 3, 70), rounding="stochastic", seed=4).view(6, 70), flat)
    assert torch.equal(fake_quantize(x[:2], rounding="stochastic", seed=4), flat[:2])
    assert torch.equal(fake_quantize(x.t(), rounding="stochastic", seed=4, axis=0), flat.t())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"seed": 1}, ValueError, "seed has no effect on rounding='nearest'"),
        ({"seed": -1, "rounding": "stochastic"}, ValueError, "seed=-1 must be in"),
        ({"seed": 2**64, "rounding": "stochastic"}, ValueError, "must be in"),
        ({"seed": 1.0, "rounding": "stochastic"}, TypeError, "float"),
        ({"seed": True, "rounding": "stochastic"}, TypeError, "bool"),
    ],
)
def test_wrong_seeds_raise(options, error, words):
    for function in (fake_quantize, numerics.quantize, fastest):
        with pytest.raises(error, match=words):
            function(torch.ones(2, 32), **options)


@pytest.mark.parametrize("size", numerics.ROTATION_SIZES)
def test_is_the_block_diagonal_sylvester_matrix(size):
    x = gaussian(3, 2 * size, dtype=torch.float64)
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]).double()
    expected = (x.unflatten(-1, (2, size)) @ matrix / size**0.5).flatten(-2)
    assert torch.allclose(rotate(x, size), expected, atol=1e-12)


def test_rotated_operands_with_the_same_signs_have_the_same_product():
    x = gaussian(2, 96, seed=1, dtype=torch.float64)
    weight = gaussian(7, 96, seed=2, dtype=torch.float64)
    signs = random_signs(96, seed=3)
    rotated = rotate(x, 32, signs=signs)
    assert not torch.allclose(rotated, rotate(x, 32))
    torch.testing.assert_close(rotated @ rotate(weight, 32, signs=signs).T, x @ weight.T)


@pytest.mark.parametrize("signs", [None, random_signs(96, seed=3)], ids=["deterministic", "random"])
def test_unrotate_is_the_inverse_of_rotate(signs):
    x = gaussian(2, 96, seed=1, dtype=torch.float64)
    torch.testing.assert_close(numerics.unrotate(rotate(x, 32, signs=signs), 32, signs=signs), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rotations_along_any_axis_and_dtype(dtype):
    x = gaussian(32, 5, 3, dtype=torch.float64).to(dtype)
    along_first = rotate(x, 32, axis=0)
    assert along_first.dtype == dtype
    assert along_first.shape == x.shape
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
