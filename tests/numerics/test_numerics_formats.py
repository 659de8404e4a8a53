# SPDX-License-Identifier: Apache-2.0
"""Formats of elements and scales, E2M1, E8M0 and E4M3, and what stored bytes decode to; NVFP4 against torchao and
compressed-tensors bit for bit, its values by hand, and its errors in the reports."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_mxfp4 import numerics
from hf_mxfp4.lab import error_statistics
from hf_mxfp4.numerics import (
    NVFP4,
    MXFP4Tensor,
    QuantScheme,
    ScaleRule,
    fake_quantize_e4m3,
    fake_quantize_nvfp4,
    quantize_nvfp4,
)


#: Of codes 0 to 15: sign, two exponent bits, one mantissa bit (OCP MX v1.0, section 5.3.3).
CODE_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_each_code_is_decoded_and_encoded_again_without_the_sign_of_zero():
    values = numerics.decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert values.dtype == torch.float32
    assert values.tolist() == CODE_VALUES
    assert torch.signbit(values).tolist() == [code >= 8 for code in range(16)]
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert values.tolist() == theirs.astype(np.float32).tolist()
    codes = numerics.encode_e2m1(torch.tensor(CODE_VALUES))
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]


def round_nearest(values: np.ndarray) -> torch.Tensor:
    """Each value, of at most 6, in a block whose scale is 1."""
    x = torch.zeros(len(values), 32)
    x[:, 0], x[:, 1] = torch.from_numpy(values), 6.0
    return numerics.fake_quantize(x)[:, 0]


def test_rounding_matches_ml_dtypes_everywhere():
    rng = np.random.default_rng(0)
    sweep = np.arange(-6 * 256, 6 * 256 + 1, dtype=np.float32) / 256
    random = (rng.choice([-1.0, 1.0], 50_000) * 2.0 ** rng.uniform(-12, 2.5, 50_000)).astype(np.float32)
    inner = sweep[1:-1]
    below = np.nextafter(sweep, np.float32(0))
    above = np.nextafter(inner, 8 * np.sign(inner))
    values = np.concatenate([sweep, below, above, random])
    expected = values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(round_nearest(values).numpy(), expected)


def test_pack_puts_the_even_index_in_the_low_nibble_and_unpack_reverses_it():
    codes = torch.tensor([[0x1, 0x2, 0xA, 0xF], [0x0, 0x8, 0x7, 0x0]], dtype=torch.uint8)
    packed = numerics.pack_codes(codes)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[0x21, 0xFA], [0x80, 0x07]]
    for length in range(10):
        codes = torch.randint(0, 16, (3, 2, length), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
        packed = numerics.pack_codes(codes)
        assert packed.shape == (3, 2, (length + 1) // 2)
        assert torch.equal(numerics.unpack_codes(packed, length), codes), length


@pytest.mark.parametrize("length", [0, 6, 9, 32])
def test_unpack_refuses_a_length_that_does_not_fit(length):
    with pytest.raises(ValueError, match=rf"4 packed bytes cannot hold {length} .* expected {(length + 1) // 2} bytes"):
        numerics.unpack_codes(torch.zeros(2, 4, dtype=torch.uint8), length)


def expected_byte(amax: float, rule: str) -> int:
    """In exact fractions."""
    mantissa, exponent = math.frexp(amax)
    shift = {"rceil": mantissa > 0.75, "even": mantissa >= 0.875}.get(rule, False)
    return min(max(exponent - 3 + shift + 127, 0), 254)


def boundary_maxima() -> list[float]:
    """Every float32 exponent with the mantissas next to where a rule switches."""
    values = []
    for exponent in range(-126, 128):
        for mantissa in (1.0, 1.25, 1.5, 1.75, 1.99):
            value = np.float32(math.ldexp(mantissa, exponent))
            values += [np.nextafter(value, np.float32(0)), value, np.nextafter(value, np.float32(math.inf))]
    return [float(value) for value in values]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_scales_are_those_of_ml_dtypes_and_torch(dtype):
    raw = np.arange(256, dtype=np.uint8)
    ours = numerics.decode_e8m0(torch.from_numpy(raw).to(dtype)).numpy()
    np.testing.assert_array_equal(ours, raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    np.testing.assert_array_equal(ours, torch.from_numpy(raw).view(torch.float8_e8m0fnu).float().numpy())


@pytest.mark.parametrize("rule", list(ScaleRule), ids=lambda rule: rule.value)
def test_rule_at_every_boundary_of_every_exponent(rule):
    maxima = boundary_maxima()
    bytes_ = numerics.scale_from_amax(torch.tensor(maxima, dtype=torch.float32), rule).tolist()
    wrong = [(amax, byte) for amax, byte in zip(maxima, bytes_, strict=True) if byte != expected_byte(amax, rule.value)]
    assert not wrong[:5]


@pytest.mark.parametrize(("rule", "largest"), [("rceil", 253), ("floor", 252), ("even", 253), ("mse", 252)])
def test_rule_outside_the_normal_range(rule, largest):
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, torch.finfo(torch.float32).max, math.inf, math.nan])
    assert numerics.scale_from_amax(amax, ScaleRule(rule)).tolist() == [0, 0, 0, largest, 255, 255]
    nan_with_a_sign = torch.tensor([-1, -0x400000], dtype=torch.int32).view(torch.float32)  # 0xFFFFFFFF, 0xFFC00000
    assert numerics.scale_from_amax(nan_with_a_sign, ScaleRule(rule)).tolist() == [255, 255]


def test_clips_says_which_rules_saturate():
    maxima = torch.tensor([math.ldexp(1 + i / 64, 0) for i in range(64)])
    for rule in ScaleRule:
        saturates = bool((maxima > 6 * numerics.decode_e8m0(numerics.scale_from_amax(maxima, rule))).any())
        assert rule.clips == saturates


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([448.0, 1.0, 17.0, 19.0], [448.0, 1.0, 16.0, 20.0]),  # scale 1; ties to even
        ([449.0, 1.0, 0.0, -3.0], [448.0, 1.0, 0.0, -3.0]),  # scale 2
        ([1.0, 1.0625, 1.1, -1.75], [1.0, 1.0, 1.125, -1.75]),  # scale 2**-8
        ([0.0, 0.0, 0.0, -0.0], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_e4m3_literals(row, expected):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.tensor([row], dtype=torch.float64).to(dtype)
        if x.double().tolist() == [row]:
            assert fake_quantize_e4m3(x).tolist() == [expected]
            assert fake_quantize_e4m3(x).dtype == dtype


def test_edges_of_e4m3():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        largest = torch.finfo(dtype).max
        values = fake_quantize_e4m3(torch.tensor([[largest, -largest, 1.0]], dtype=dtype))
        assert values.isfinite().all()
        assert values[0, 0] > 0.9 * min(largest, torch.finfo(torch.float32).max)
    x = torch.ones(3, 4)
    x[0, 1], x[2, 3] = torch.nan, torch.inf
    values = fake_quantize_e4m3(x)
    assert values[[0, 2]].isnan().all()
    assert torch.equal(values[1], torch.ones(4))
    for shape in ((0, 5), (5, 0)):
        assert fake_quantize_e4m3(torch.zeros(shape)).shape == shape
    assert fake_quantize_e4m3(torch.ones(3)).tolist() == [1.0] * 3
    with pytest.raises(TypeError, match="torch.int64"):
        fake_quantize_e4m3(torch.ones(3, dtype=torch.int64))


def test_literal_blocks_of_mxfp8():
    """A maximum of 1.75 * 2 has the scale 2**-7, anything larger 2**-6: 230.4 is then between 224 and 240."""
    x = torch.zeros(2, 70)
    x[0, :4] = torch.tensor([3.5, -1.0, 2.0**-16, 2.0**-17])  # 448, -128, the smallest element, a tie below it
    x[0, 32:34] = torch.tensor([3.6, -0.01])
    x[0, 64:66] = torch.tensor([-448.0, 19.0])
    x[1, 3], x[1, 40] = math.nan, -math.inf
    elements, byte = numerics.quantize_mxfp8(x)
    assert byte.tolist() == [[120, 121, 127], [255, 255, 1]]
    assert elements.shape == x.shape
    assert elements[0, :4].tolist() == [448.0, -128.0, 2.0**-9, 0.0]
    assert elements[0, 32:34].tolist() == [224.0, -0.625]
    assert elements[0, 64:66].tolist() == [-448.0, 20.0]
    values = numerics.dequantize_mxfp8(elements, byte, torch.bfloat16)
    assert values.dtype == torch.bfloat16
    assert values[0, [0, 2, 32, 65]].tolist() == [3.5, 2.0**-16, 3.5, 20.0]
    assert values[1, :64].isnan().all()
    assert not values[1, 64:].any()
    for shape in ((0, 5), (5, 0), (3,)):
        assert numerics.quantize_mxfp8(torch.zeros(shape))[1].shape == (*shape[:-1], -(-shape[-1] // 32))


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """256 rows of one block each: row b has scale byte b and the sixteen codes twice."""
    codes = numerics.pack_codes(torch.arange(32, dtype=torch.uint8).remainder(16).expand(256, 32).contiguous())
    return codes, torch.arange(256, dtype=torch.int32).to(torch.uint8).view(256, 1)


PLAIN = QuantScheme()


def of_bytes(
    codes: torch.Tensor, scale: torch.Tensor, length: int, scheme: QuantScheme = PLAIN, **parts: torch.Tensor
) -> MXFP4Tensor:
    """A float32 tensor of these bytes, and of the other ``parts`` that the scheme has."""
    others = {"macro": None, "residual_codes": None, "residual_scale": None} | parts
    return MXFP4Tensor(codes, scale, **others, length=length, axis=1, scheme=scheme, dtype=torch.float32)


def exact_value(code: int, byte: int) -> Fraction:
    magnitude = Fraction(numerics.E2M1_MAGNITUDES[code & 7]) * Fraction(2) ** (byte - 127)
    return -magnitude if code & 8 else magnitude


def test_every_pair_is_exact_in_float64():
    values = of_bytes(*all_pairs(), 32).dequantize(torch.float64)
    assert values.dtype == torch.float64
    for byte in range(255):
        assert [Fraction(value) for value in values[byte].tolist()] == [exact_value(i % 16, byte) for i in range(32)]
    assert values[255].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pair_in_a_narrow_dtype_is_rounded_once_and_saturates(dtype):
    packed = of_bytes(*all_pairs(), 32)
    exact = packed.dequantize(torch.float64)
    largest = torch.finfo(dtype).max
    values = packed.dequantize(dtype)
    assert values.dtype == dtype
    assert torch.equal(values[:255], exact[:255].clamp(-largest, largest).to(dtype))
    assert values[:255].isfinite().all()
    assert values[255].isnan().all()


def test_literal_bytes():
    # 0x21: 0.5 then 1.0; 0xFA: -1.0 then -6.0; 0x07: 6.0
    codes = torch.tensor([[0x21, 0xFA, 0x07]], dtype=torch.uint8)
    scale = torch.tensor([[129]], dtype=torch.uint8)
    assert of_bytes(codes, scale, 5).dequantize().tolist() == [[2.0, 4.0, -4.0, -24.0, 24.0]]


def test_literal_bytes_with_macro_and_residual():
    codes, scale, macro, residual, residual_scale = torch.tensor([0x66, 127, 64, 0xA4, 126], dtype=torch.uint8).view(
        5, 1, 1
    )
    scheme = QuantScheme(macro_block=128, outlier_fallback=0.5)
    packed = of_bytes(codes, scale, 2, scheme, macro=macro, residual_codes=residual, residual_scale=residual_scale)
    # (4 + 0.5 * 0.5 * 2) / 1.25 and (4 - 0.5 * 0.5 * 1) / 1.25
    assert packed.dequantize().tolist() == [[float(np.float32(4.5) / np.float32(1.25)), 3.0]]


BYTES = torch.zeros(3, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("length", "scheme", "parts", "message"),
    [
        (65, "rceil", {}, "codes has 32 bytes .* need 33"),
        (61, "rceil", {}, "codes has 32 bytes .* need 31"),
        (63, "rceil+of1", {"residual_codes": BYTES, "residual_scale": BYTES}, "residual_codes has 2 bytes .* need 32"),
        (64, "rceil+mbs128", {"macro": BYTES}, "macro has 2 bytes .* need 1"),
        (64, "rceil+mbsrow", {"macro": BYTES}, "macro has 2 bytes .* need 1"),
    ],
)
def test_shapes_that_do_not_fit(length, scheme, parts, message):
    packed = of_bytes(torch.zeros(3, 32, dtype=torch.uint8), BYTES, length, numerics.parse_scheme(scheme), **parts)
    with pytest.raises(ValueError, match=message):
        packed.dequantize()


def test_a_scale_for_each_block_is_needed():
    packed = of_bytes(torch.zeros(3, 48, dtype=torch.uint8), BYTES, 96)
    with pytest.raises(ValueError, match="scale has 2 bytes .* need 3"):
        packed.dequantize()


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("mse+of0.5", torch.bfloat16),
        ("rceil+mbs64-dynamic", torch.float32),
        ("even+mbs128-blockwise", torch.float64),
        ("floor+mbsrow", torch.float32),
    ],
)
def test_no_host_reads_a_value_or_sends_one(scheme, dtype):
    """Fake tensors have no values to read, and refuse a tensor that the host makes beside them. What is left can be
    captured in a CUDA graph. Meta: the branches for devices, on a machine without one."""
    scheme = numerics.parse_scheme(scheme)
    with FakeTensorMode(allow_non_fake_inputs=False):
        x = torch.empty(40, 65, dtype=dtype, device="meta")
        assert numerics.apply_scheme(x, scheme).shape == x.shape
        assert numerics.quantize(x, **vars(scheme)).dequantize().shape == x.shape


def spread(dtype=torch.float32, rows: int = 64, columns: int = 512) -> torch.Tensor:
    """Rows whose standard deviations are spread over three octaves."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp2(3 * torch.rand(rows, 1, generator=generator))).to(dtype)


def positive_zero(codes: torch.Tensor, length: int) -> torch.Tensor:
    codes = numerics.unpack_codes(codes, length)
    return torch.where(codes == 8, 0, codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_and_scales_are_those_of_torchao(dtype):
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = spread(dtype)
    codes, scale, tensor_scale = quantize_nvfp4(x)
    factor = theirs.per_tensor_amax_to_scale(x.abs().max())
    their_scale, their_codes = theirs.nvfp4_quantize(x, 16, factor)
    assert torch.equal(tensor_scale[0], factor)
    assert scale.float().min() > 2.0**-6
    assert torch.equal(scale.view(torch.uint8), their_scale.view(torch.uint8))
    assert torch.equal(positive_zero(codes, 512), positive_zero(their_codes, 512))
    values = theirs.NVFP4Tensor(codes, scale, 16, dtype, per_tensor_scale=factor).dequantize(dtype)
    assert torch.equal(values, fake_quantize_nvfp4(x))
    assert torch.equal(values, numerics.dequantize_nvfp4(codes, scale, tensor_scale, 512, dtype))


def test_scales_are_those_of_compressed_tensors():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    options = {"num_bits": 4, "type": "float", "symmetric": True, "scale_dtype": torch.float8_e4m3fn}
    args = quantization.QuantizationArgs(strategy="group", group_size=16, **options)
    x = spread()
    groups = x.unflatten(1, (-1, 16))
    divisor = generate_gparam(x.min(), x.max())
    theirs, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, divisor)
    assert torch.equal(theirs, quantize_nvfp4(x)[1].float())
    torch.testing.assert_close(1 / divisor, numerics.nvfp4_tensor_scale(x))


def test_literal():
    # Tensor scale 1; groups of scales 448, 7 / 6 -> 1.125, and 2**-9 / 6, which is below the smallest.
    x = torch.zeros(1, 50)
    x[0, :3] = torch.tensor([2688.0, -112.0, 111.0])
    x[0, 16:19] = torch.tensor([7.0, -5.7, 0.28])
    x[0, 32] = 2.0**-9
    codes, scale, tensor_scale = quantize_nvfp4(x)
    assert tensor_scale.tolist() == [1.0]
    assert scale.tolist() == [[448.0, 1.125, 2.0**-9, 1.0]]
    assert codes[0, [0, 1, 8, 9, 16]].tolist() == [0x07, 0x00, 0xF7, 0x00, 0x02]
    assert codes.shape == (1, 25)
    values = fake_quantize_nvfp4(x)
    # 7 / 1.125 saturates at 6, 5.7 / 1.125 rounds to 6 and .28 / 1.125 to 0; -112 / 448 is a tie and becomes 0.
    assert values[0, [0, 1, 2, 16, 17, 18, 32]].tolist() == [2688.0, 0.0, 0.0, 6.75, -6.75, 0.0, 2.0**-9]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bad_element_spoils_its_group_of_nvfp4_alone(dtype):
    x = spread(rows=5, columns=40).to(dtype)
    x[0, 3] = math.nan
    x[1, 20] = -math.inf
    spoiled = torch.zeros(5, 40, dtype=torch.bool)
    spoiled[0, :16] = True
    spoiled[1, 16:32] = True

    values = fake_quantize_nvfp4(x)
    codes, scale, _ = quantize_nvfp4(x)

    assert values.dtype == dtype
    assert torch.equal(values.isnan(), spoiled)
    assert scale.isnan().sum() == 2
    assert not codes[0, :8].any()
    assert torch.equal(values[2:], fake_quantize_nvfp4(x[2:], numerics.nvfp4_tensor_scale(x)))


def test_a_group_of_zeros_has_the_scale_1():
    x = spread(rows=1, columns=40)
    x[0, :16] = 0
    _, scale, _ = quantize_nvfp4(x)
    assert scale[0, 0] == 1
    assert not fake_quantize_nvfp4(x)[0, :16].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_numbers_stay_finite_in_nvfp4(dtype):
    largest = torch.full((2, 16), torch.finfo(dtype).max, dtype=dtype)
    assert fake_quantize_nvfp4(largest).isfinite().all()


def test_a_tensor_scale_for_each_row_of_nvfp4():
    x = spread(rows=5, columns=40)
    alone = torch.cat([fake_quantize_nvfp4(row[None]) for row in x])
    assert torch.equal(fake_quantize_nvfp4(x, numerics.nvfp4_tensor_scale(x, per_row=True)), alone)


def test_nvfp4_of_no_rows_and_of_integers():
    assert fake_quantize_nvfp4(torch.empty(0, 40)).shape == (0, 40)
    with pytest.raises(TypeError, match="floating-point"):
        quantize_nvfp4(torch.ones(2, 16, dtype=torch.int32))


def test_errors_are_decomposed_in_groups_of_sixteen_under_one_tensor_scale():
    x = spread(rows=300, columns=520)
    error = (fake_quantize_nvfp4(x) - x).double()
    parts = numerics.decompose_scheme(x, NVFP4)
    found = error_statistics(x, NVFP4)
    assert torch.equal(parts.total, error)
    assert parts.scale_ratio.numel() == 300 * 33
    assert 0.94 < parts.scale_ratio.min() and parts.scale_ratio.max() < 1.07  # E4M3 rounds by at most 1 / 16
    assert found.relative_mse == pytest.approx(float(error.square().sum() / x.double().square().sum()), rel=1e-9)
    assert found.blocks == 300 * 33
    assert found.deadzone == pytest.approx(float(parts.deadzone.square().sum()))
    assert found.total == pytest.approx(error_statistics(x.t().contiguous(), NVFP4, axis=0).total)


def test_the_text():
    assert numerics.parse_scheme("nvfp4") is NVFP4
    assert str(NVFP4) == "nvfp4"
    with pytest.raises(ValueError, match=r"'nvfp4\+of1': 'nvfp4' has no options"):
        numerics.parse_scheme("nvfp4+of1")
    with pytest.raises(ValueError, match="did you mean 'nvfp4'"):
        numerics.parse_scheme("nvpf4")
