# SPDX-License-Identifier: Apache-2.0
"""MXFP4 as E4M3 elements: exact where the definition says so, counted and bounded where not."""

import pytest
import torch
from tables import RULES

from hf_mxfp4 import numerics
from hf_mxfp4.numerics import E2M1_MAGNITUDES, MXFP4Tensor, QuantScheme, fold, fold_unsupported_reason, pack_codes


PLAIN = QuantScheme()
MBS = QuantScheme("rceil", 128)


def tensor_of(codes: torch.Tensor, scale: torch.Tensor, macro=None, scheme=PLAIN) -> MXFP4Tensor:
    scale = scale.to(torch.uint8)
    packed = pack_codes(codes.to(torch.uint8))
    return MXFP4Tensor(packed, scale, macro, None, None, codes.shape[-1], codes.dim() - 1, scheme, torch.float32)


@pytest.mark.parametrize("group", ["row", 128])
def test_every_code_at_every_scale_byte_is_exact_up_to_a_spread_of_14(group):
    """Blocks hold all 16 codes twice; the second block of each row lies below the first."""
    pairs = torch.tensor([(top, top - spread) for spread in range(15) for top in range(spread, 255)])
    codes = torch.arange(32).remainder(16).repeat(len(pairs), 4)
    tensor = tensor_of(codes, pairs.repeat(1, 2))
    folded = fold(tensor, group)
    assert folded.n_inexact == 0
    # 4 and 6 at bytes 253 and 254 are no float32 numbers; float64 holds all.
    assert torch.equal(folded.dequantize(torch.float64), tensor.dequantize(torch.float64))
    assert torch.equal(folded.dequantize(), tensor.dequantize())
    assert (folded.scale >= 2.0**-125).all() and (torch.frexp(folded.scale)[0] == 0.5).all()
    assert folded.elements.dtype == torch.float8_e4m3fn and folded.n_inexact.dtype == torch.int32


def test_e4m3_holds_these_exponents_and_no_others():
    values = torch.tensor(E2M1_MAGNITUDES)
    exact = [
        s for s in range(-12, 10) if torch.equal((values * 2.0**s).to(torch.float8_e4m3fn).float(), values * 2.0**s)
    ]
    assert exact == list(range(-8, 7))


@pytest.mark.parametrize(("spread", "n"), [(14, 0), (15, 1), (16, 1), (30, 1), (120, 1)])
def test_what_does_not_fit_is_counted_and_bounded(spread, n):
    codes = torch.arange(16).repeat(1, 8)
    tensor = tensor_of(codes, torch.tensor([[130, 130, 130 - spread, 129]]))
    for group in ("row", 128):
        folded = fold(tensor, group)
        assert folded.n_inexact == n
        error = (folded.dequantize(torch.float64) - tensor.dequantize(torch.float64)).abs()
        assert error.max() <= 2.0**-10 * folded.scale.max()
        assert error.max() <= 2.0**-15 * tensor.dequantize(torch.float64).abs().max()
        assert (error.max() > 0) == (n > 0)
        assert error[:, :64].max() == error[:, 96:].max() == 0


def test_blocks_of_zeros_fit_anywhere():
    codes = torch.zeros(2, 128)
    codes[0, :32] = 7
    tensor = tensor_of(codes, torch.tensor([[60, 0, 254, 100], [0, 200, 0, 0]]))
    for group in ("row", 128):
        folded = fold(tensor, group)
        assert folded.n_inexact == 0
        assert torch.equal(folded.dequantize(), tensor.dequantize())
        # The block that counts is at the top: 6 * 2**6.
        assert folded.elements[0, 0].float() == 384


def test_nan_blocks_stay_nan_and_touch_no_other():
    codes = torch.full((1, 128), 3)
    tensor = tensor_of(codes, torch.tensor([[100, 255, 120, 255]]))
    for group in ("row", 128):
        folded = fold(tensor, group)
        values = folded.dequantize()
        assert values.isnan().sum() == 64 and values[:, 32:64].isnan().all()
        assert torch.equal(values[:, 64:96], tensor.dequantize()[:, 64:96])
        assert folded.n_inexact == 1  # 20 below the largest


@pytest.mark.parametrize("group", ["row", 128])
def test_shapes_and_padding(group):
    for shape in ((3, 1), (2, 33), (1, 128), (5, 300), (0, 64), (3, 0), (2, 3, 160)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        folded = fold(numerics.quantize(x), group)
        n_groups = -(-shape[-1] // 128)
        assert folded.elements.shape == (*shape[:-1], 128 * n_groups)
        assert folded.scale.shape == (*shape[:-1], 1 if group == "row" else n_groups)
        assert torch.equal(folded.dequantize(), numerics.fake_quantize(x)), shape
        assert not folded.elements[..., shape[-1] :].float().any(), shape


@pytest.mark.parametrize("search", ["static", "dynamic"])
@pytest.mark.parametrize("rule", RULES)
def test_macro_factors_join_the_scale(rule, search):
    x = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, 300)
    tensor = numerics.quantize(x, scale_rule=rule, macro_block=128, macro_search=search)
    folded = fold(tensor, 128)
    assert folded.n_inexact == 0
    expected = tensor.dequantize(torch.float32).double()
    # One rounding of the scale, one of the definition's division.
    assert ((folded.dequantize(torch.float64) - expected).abs() <= 2.0**-23 * expected.abs()).all()


def test_columns_fold_where_they_were_quantized():
    x = torch.randn(70, 5, generator=torch.Generator().manual_seed(2))
    tensor = numerics.quantize(x, axis=0)
    assert torch.equal(fold(tensor).dequantize(), tensor.dequantize().T)


@pytest.mark.parametrize(
    ("scheme", "group", "words"),
    [
        (MBS, "row", "macro factors vary along the row"),
        (QuantScheme("rceil", 128, "blockwise"), 128, "block mantissas vary every 32"),
        (QuantScheme("rceil", 64), 128, "macro_block=64"),
        (QuantScheme("rceil", "row"), 128, "macro_block='row'"),
        (QuantScheme("rceil", outlier_fallback=0.5), "row", "outlier fallback"),
    ],
)
def test_schemes_that_do_not_fold_say_why(scheme, group, words):
    assert words in fold_unsupported_reason(scheme, group)
    with pytest.raises(ValueError, match=words):
        fold(numerics.quantize(torch.ones(1, 128), **vars(scheme)), group)


def test_other_groups_are_refused():
    assert (
        fold_unsupported_reason(PLAIN, "row")
        is fold_unsupported_reason(PLAIN, 128)
        is fold_unsupported_reason(MBS, 128)
        is None
    )
    with pytest.raises(ValueError, match="group=64"):
        fold(numerics.quantize(torch.ones(1, 128)), 64)


def test_what_was_quantized_along_rows_folds_across_them():
    for shape in ((1, 1), (5, 40), (130, 33), (300, 128), (0, 64)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        tensor = numerics.quantize(x, scale_rule="even")
        folded = numerics.fold_across(tensor)
        n_groups = -(-shape[0] // 128)
        assert folded.elements.shape == (shape[1], 128 * n_groups) and folded.scale.shape == (shape[1], n_groups)
        assert torch.equal(folded.dequantize(), tensor.dequantize().T), shape
        assert folded.n_inexact == 0, shape


def test_across_rows_each_column_of_blocks_has_its_own_largest():
    x = torch.ones(128, 64)
    x[3, :32], x[4, 40] = 2.0**40, 2.0**-40
    folded = numerics.fold_across(numerics.quantize(x))
    # 127 blocks of the first column lie 40 exponents below its largest; in the second the one block stays whole.
    assert folded.n_inexact == 127
    assert torch.equal(folded.dequantize()[32:], numerics.fake_quantize(x).T[32:])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (numerics.quantize(torch.ones(4, 128), macro_block=128), "macro factors vary along the other axis"),
        (numerics.quantize(torch.ones(4, 128), outlier_fallback=0.5), "outlier fallback"),
        (numerics.quantize(torch.ones(4, 128), axis=0), "no matrix with blocks along its rows"),
        (numerics.quantize(torch.ones(2, 4, 128)), "no matrix with blocks along its rows"),
    ],
)
def test_what_does_not_fold_across_says_why(tensor, words):
    with pytest.raises(ValueError, match=words):
        numerics.fold_across(tensor)
