# SPDX-License-Identifier: Apache-2.0
"""Dequantization: all 16 x 256 pairs of a code and a scale byte, other people's decoders, shapes and layouts."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_mxfp4.numerics import E2M1_MAGNITUDES, apply_scheme, dequantize, pack_codes, parse_scheme, quantize


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """256 rows of one block each: row b has scale byte b and the sixteen codes twice."""
    codes = pack_codes(torch.arange(32, dtype=torch.uint8).remainder(16).expand(256, 32).contiguous())
    return codes, torch.arange(256, dtype=torch.int32).to(torch.uint8).view(256, 1)


def exact_value(code: int, byte: int) -> Fraction:
    magnitude = Fraction(E2M1_MAGNITUDES[code & 7]) * Fraction(2) ** (byte - 127)
    return -magnitude if code & 8 else magnitude


def test_every_pair_is_exact_in_float64():
    values = dequantize(*all_pairs(), length=32, dtype=torch.float64)
    assert values.dtype == torch.float64
    for byte in range(255):
        assert [Fraction(value) for value in values[byte].tolist()] == [exact_value(i % 16, byte) for i in range(32)]
    assert values[255].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pair_in_a_narrow_dtype_is_rounded_once_and_saturates(dtype):
    codes, scale = all_pairs()
    exact = dequantize(codes, scale, length=32, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    values = dequantize(codes, scale, length=32, dtype=dtype)
    assert values.dtype == dtype
    assert torch.equal(values[:255], exact[:255].clamp(-largest, largest).to(dtype))
    assert values[:255].isfinite().all() and values[255].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_pair_of_bytes_against_transformers(dtype):
    from transformers.integrations import mxfp4

    blocks = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    theirs = mxfp4._convert_moe_packed_tensors(blocks.contiguous(), scale.contiguous(), dtype=dtype)
    theirs = theirs.transpose(1, 2)[0]
    ours = dequantize(blocks[0].flatten(-2), scale[0], length=512, dtype=dtype)
    # Byte 255 is NaN in the specification and 2**128 there; overflow saturates here and is infinite there.
    fits = theirs.isfinite()
    fits[255] = False
    assert int((~fits[:255]).sum()) == 2 * (2 + 4) * 32
    assert torch.equal(ours[fits], theirs[fits])
    assert torch.equal(ours[:255][~fits[:255]], torch.finfo(dtype).max * theirs[:255][~fits[:255]].sign())
    assert ours[255].isnan().all()


def test_literal_bytes():
    # 0x21: 0.5 then 1.0; 0xFA: -1.0 then -6.0; 0x07: 6.0
    codes = torch.tensor([[0x21, 0xFA, 0x07]], dtype=torch.uint8)
    scale = torch.tensor([[129]], dtype=torch.uint8)
    assert dequantize(codes, scale, length=5).tolist() == [[2.0, 4.0, -4.0, -24.0, 24.0]]


def test_literal_bytes_with_macro_and_residual():
    codes = torch.tensor([[0x66]], dtype=torch.uint8)
    residual = torch.tensor([[0xA4]], dtype=torch.uint8)
    out = dequantize(
        codes,
        torch.tensor([[127]], dtype=torch.uint8),
        length=2,
        macro=torch.tensor([[64]], dtype=torch.uint8),
        macro_block=128,
        residual_codes=residual,
        residual_scale=torch.tensor([[126]], dtype=torch.uint8),
        outlier_fallback=0.5,
    )
    # (4 + 0.5 * 0.5 * 2) / 1.25 and (4 - 0.5 * 0.5 * 1) / 1.25
    assert out.tolist() == [[float(np.float32(4.5) / np.float32(1.25)), 3.0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 65}, "scale has 2 bytes along its last axis; 65 elements need 3"),
        ({"length": 30}, "scale has 2 bytes along its last axis; 30 elements need 1"),
        ({"length": 61}, "32 packed bytes cannot hold 61 4-bit codes; expected 31 bytes"),
        (
            {"length": 64, "residual_scale": torch.zeros(3, 1, dtype=torch.uint8)},
            "residual_scale has 1 bytes along its last axis; 64 elements need 2",
        ),
        (
            {"length": 64, "macro": torch.zeros(3, 2, dtype=torch.uint8), "macro_block": 128},
            "macro has 2 bytes along its last axis; 64 elements in macro blocks of 128 need 1",
        ),
        (
            {"length": 64, "macro": torch.zeros(3, 2, dtype=torch.uint8), "macro_block": "row"},
            "macro has 2 bytes along its last axis; 64 elements in macro blocks of row need 1",
        ),
    ],
    ids=["scale-short", "scale-long", "codes", "residual-scale", "macro", "macro-row"],
)
def test_shapes_that_do_not_fit(options, message):
    codes, scale = torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        dequantize(codes, scale, **options)


def test_dequantize_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        packed = quantize(torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).to(dtype))
        assert packed.dequantize().dtype == dtype
        # Two significant bits fit everywhere: the plain result is the same number in every dtype.
        assert torch.equal(packed.dequantize().double(), packed.dequantize(torch.float64))
        assert packed.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("mse+of0.5", torch.bfloat16),
        ("rceil+mbs64-dynamic", torch.float32),
        ("even+mbs128-blockwise", torch.float64),
        ("floor+mbsrow", torch.float32),
        ("rceil+of0.5@0.1", torch.bfloat16),
    ],
)
def test_no_host_reads_a_value_or_sends_one(scheme, dtype):
    """Fake tensors have no values to read, and refuse a tensor that the host makes beside them. What is left can be
    captured in a CUDA graph. Meta: the branches for devices, on a machine without one."""
    scheme = parse_scheme(scheme)
    with FakeTensorMode(allow_non_fake_inputs=False):
        x = torch.empty(40, 65, dtype=dtype, device="meta")
        assert apply_scheme(x, scheme).shape == x.shape
        assert quantize(x, **vars(scheme)).dequantize().shape == x.shape
