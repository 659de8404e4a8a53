# SPDX-License-Identifier: Apache-2.0
"""One weight rounded by GPTQ: against eliminating columns one by one, what stays when it is quantized again, and what
is refused."""

import dataclasses

import pytest
import torch

from hf_mxfp4.lab import round_weight
from hf_mxfp4.lab.rounding import DAMPING, output_error, quantized_again, unsupported_reason
from hf_mxfp4.numerics import QuantScheme, Rotation, apply_scheme, parse_scheme, quantize, rotate


SCHEMES = ("even", "rceil", "floor", "mse", "even+mbs128-blockwise", "rceil+32x32")


def case(rows=32, columns=96, tokens=200, seed=0):
    """A weight, and second moments of inputs that are much alike."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    few = torch.randn(tokens, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
    inputs = few + 0.3 * torch.randn(tokens, columns, generator=generator)
    return weight, inputs.T @ inputs


def by_elimination(weight, moments, block=32):
    """Optimal brain quantization in float64, one column after the other, with scales by the rule `even`."""
    rest, count = weight.double().clone(), weight.shape[1]
    inverse = torch.linalg.inv(moments.double() + DAMPING * moments.double().diagonal().mean() * torch.eye(count))
    found = torch.empty_like(rest)
    for j in range(count):
        if j % block == 0:
            exponents = quantize(rest[:, j : j + block].float(), scale_rule="even").scale[:, 0]
        scale = torch.exp2(exponents.double() - 127)
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        place = (rest[:, j, None].abs() / scale[:, None] - grid).abs().argmin(1)
        found[:, j] = grid[place] * scale * rest[:, j].sign()
        error = (rest[:, j] - found[:, j]) / inverse[j, j]
        rest -= torch.outer(error, inverse[j])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1  # it is done with
    return found.float()


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_elimination_of_one_column_after_the_other(seed):
    weight, moments = case(rows=8, seed=seed)
    found = round_weight(weight, moments, QuantScheme("even"))
    # Where float32 is on the other side of a boundary, all that follows in the row is another solution.
    same = (found == by_elimination(weight, moments)).all(1)
    assert same.sum() >= 7
    nearest = apply_scheme(weight, QuantScheme("even"))
    assert output_error(found - weight, moments) < 0.5 * output_error(nearest - weight, moments)


def test_one_block_by_another_way():
    """Of two columns the second makes up for the first: the least squares of what is left."""
    torch.manual_seed(1)
    weight = torch.zeros(16, 32)
    weight[:, :2] = torch.randn(16, 2)
    weight[:, 31] = 6.0  # keeps the block scale at 1
    x = torch.zeros(100, 32)
    x[:, 0] = torch.randn(100)
    x[:, 1] = 0.9 * x[:, 0] + 0.1 * torch.randn(100)
    gram = x.t() @ x
    found = round_weight(weight, gram, QuantScheme("rceil"))
    assert torch.equal(found[:, 0], apply_scheme(weight, QuantScheme("rceil"))[:, 0])
    damped = gram + torch.eye(32) * 0.01 * gram.diagonal().mean()
    wanted = weight[:, 1] + (weight[:, 0] - found[:, 0].float()) * damped[0, 1] / damped[1, 1]
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat([grid, -grid])
    assert torch.equal(found[:, 1].float().abs(), grid[(wanted[:, None] - grid).abs().argmin(1)].abs())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_that_are_not_alike_leave_the_nearest_values(scheme):
    weight, _ = case(columns=160)
    found = round_weight(weight, 3 * torch.eye(160), parse_scheme(scheme))
    assert torch.equal(found, apply_scheme(weight, parse_scheme(scheme)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_again_the_values_stay(scheme, dtype):
    weight, moments = case(columns=160)
    scheme = parse_scheme(scheme)
    found = round_weight(weight.to(dtype), moments, scheme)
    assert found.dtype == dtype
    assert torch.equal(quantize(found, **dataclasses.asdict(scheme)).dequantize(), found)
    nearest = apply_scheme(weight.to(dtype), scheme)
    assert output_error((found - weight).float(), moments) < 0.6 * output_error((nearest - weight).float(), moments)


@pytest.mark.parametrize("rotation", [None, Rotation(32)], ids=str)
@pytest.mark.parametrize("scheme", ["even+mbs128-blockwise+of1@0.25", "even+of1@0.25", "rceil+of1"])
def test_residuals_are_rounded_too(scheme, rotation):
    weight, moments = case(rows=64, columns=128)
    scheme = parse_scheme(scheme)
    found = round_weight(weight.bfloat16(), moments, scheme, rotation)
    values, nearest = (quantized_again(each, scheme, rotation) for each in (found, weight))
    assert output_error(values - weight, moments) < 0.6 * output_error(nearest - weight, moments)
    plain = round_weight(
        weight.bfloat16(), moments, dataclasses.replace(scheme, outlier_fallback=None, fallback_rate=None), rotation
    )
    assert output_error(values - weight, moments) < 0.9 * output_error(plain.float() - weight, moments)


def test_residuals_by_hand():
    """Inputs that are not alike leave the nearest values and their residuals, where these are kept."""
    weight = torch.zeros(1, 4, 32)
    weight[..., 0], weight[..., 1] = 6.0, torch.tensor([2.2, 2.4, 2.0, 2.1])
    found = round_weight(weight.view(1, 128), torch.eye(128), parse_scheme("rceil+of1@0.25")).view(4, 32)
    # Of four blocks one has a residual: the one whose error, of 2.4, is largest: .4 is .375 in steps of 2**-5.
    assert found[:, 1].tolist() == [2.0, 2.375, 2.0, 2.0] and (found[:, 0] == 6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_values_stay(dtype):
    weight, moments = case(columns=192)
    scheme, rotation = parse_scheme("even+mbs128-blockwise"), Rotation(64)
    found = round_weight(weight.to(dtype), moments, scheme, rotation)
    again = apply_scheme(rotate(found.float(), 64), scheme)
    assert torch.allclose(rotate(again, 64), found.float(), rtol=0, atol=0.02)
    nearest = rotate(apply_scheme(rotate(weight, 64), scheme), 64)
    assert output_error(found.float() - weight, moments) < 0.6 * output_error(nearest - weight, moments)
    # On the grid before it is rotated it would be worse off.
    plain = rotate(apply_scheme(rotate(round_weight(weight, moments, scheme), 64), scheme), 64)
    assert output_error(found.float() - weight, moments) < output_error(plain - weight, moments)


def test_output_error_is_that_of_the_outputs():
    inputs = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    change = torch.tensor([[1.0, -1.0], [0.5, 0.0]])
    # Outputs: (1 - 2, .5) and (-3, 0).
    assert output_error(change, inputs.T @ inputs) == pytest.approx(1 + 0.25 + 9)


def test_inputs_of_zeros_and_weights_of_zeros_are_no_harm():
    weight, moments = case(columns=64)
    moments[5], moments[:, 5] = 0, 0
    weight[:, 32:] = 0
    found = round_weight(weight, moments, QuantScheme("even"))
    assert found.isfinite().all()
    assert torch.equal(
        round_weight(weight, torch.zeros(64, 64), QuantScheme("even")), apply_scheme(weight, QuantScheme("even"))
    )


@pytest.mark.parametrize(
    ("scheme", "rotation", "match"),
    [
        ("rceil+of0.5", None, "a residual times 0.5"),
        ("even+stochastic", None, "stochastic"),
        ("rceil+mbs128-static", None, "blockwise"),
        ("rceil+mbs32-dynamic", None, "blockwise"),
        ("even", Rotation(16, random=True), "deterministic"),
    ],
)
def test_schemes_whose_values_would_not_stay_are_refused(scheme, rotation, match):
    weight, moments = case()
    assert match in unsupported_reason(parse_scheme(scheme), rotation)
    with pytest.raises(ValueError, match=match):
        round_weight(weight, moments, parse_scheme(scheme), rotation)


def test_what_cannot_be_computed_says_so():
    weight, moments = case()
    with pytest.raises(ValueError, match="not finite on these texts"):
        round_weight(weight, moments * float("nan"), QuantScheme("even"))
    with pytest.raises(ValueError, match="the weight is not finite"):
        round_weight(weight / 0, moments, QuantScheme("even"))
    with pytest.raises(ValueError, match="does not divide the 96 inputs"):
        round_weight(weight, moments, QuantScheme("even"), Rotation(64))
    with pytest.raises(ValueError, match="float16 cannot hold"):
        round_weight((weight * 2.0**-23).half(), moments, QuantScheme("even"))
