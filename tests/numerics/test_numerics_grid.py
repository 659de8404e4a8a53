# SPDX-License-Identifier: Apache-2.0
"""The E2M1 codec: every code, every tie, every packed byte."""

import ml_dtypes
import numpy as np
import pytest
import torch

from hf_mxfp4.numerics import E2M1_MAGNITUDES, decode_e2m1, encode_e2m1, pack_codes, unpack_codes
from hf_mxfp4.numerics.formats import round_nearest


# OCP MX v1.0, section 5.3.3: sign, two exponent bits, one mantissa bit.
CODE_VALUES = {
    0b0000: 0.0,
    0b0001: 0.5,
    0b0010: 1.0,
    0b0011: 1.5,
    0b0100: 2.0,
    0b0101: 3.0,
    0b0110: 4.0,
    0b0111: 6.0,
    0b1000: -0.0,
    0b1001: -0.5,
    0b1010: -1.0,
    0b1011: -1.5,
    0b1100: -2.0,
    0b1101: -3.0,
    0b1110: -4.0,
    0b1111: -6.0,
}


def oracle_codes(values: np.ndarray) -> np.ndarray:
    """Codes of float32 values by ml_dtypes' own cast, -0 canonicalised."""
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    return np.where(codes == 8, 0, codes)


def test_decode_each_code():
    values = decode_e2m1(torch.tensor(list(CODE_VALUES), dtype=torch.uint8))
    assert values.dtype == torch.float32
    assert values.tolist() == list(CODE_VALUES.values())
    assert torch.signbit(values).tolist() == [code >= 8 for code in CODE_VALUES]
    theirs = np.array(list(CODE_VALUES), np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert values.tolist() == theirs.astype(np.float32).tolist()


def test_encode_inverts_decode_and_drops_the_sign_of_zero():
    codes = encode_e2m1(torch.tensor(list(CODE_VALUES.values())))
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15]


def test_ties_go_to_the_even_code():
    ties = ((0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0))
    for tie, even in ties:
        neighbours = sorted(E2M1_MAGNITUDES, key=lambda magnitude: abs(magnitude - tie))[:2]
        below, above = min(neighbours), max(neighbours)
        y = np.float32(tie)
        inputs = [np.nextafter(y, np.float32(0)), y, np.nextafter(y, np.float32(8))]
        for sign in (1.0, -1.0):
            rounded = round_nearest(torch.tensor([sign * float(value) for value in inputs]))
            assert rounded.tolist() == [sign * below, sign * even, sign * above], tie


def test_rounding_matches_ml_dtypes_everywhere():
    rng = np.random.default_rng(0)
    sweep = np.arange(-8 * 256, 8 * 256 + 1, dtype=np.float32) / 256
    random = (rng.choice([-1.0, 1.0], 50_000) * 2.0 ** rng.uniform(-12, 6, 50_000)).astype(np.float32)
    values = np.concatenate(
        [sweep, np.nextafter(sweep, np.float32(np.inf)), np.nextafter(sweep, np.float32(-np.inf)), random]
    )
    rounded = round_nearest(torch.from_numpy(values.copy()))
    np.testing.assert_array_equal(rounded.numpy(), values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))
    np.testing.assert_array_equal(encode_e2m1(rounded).numpy(), oracle_codes(values))


def test_pack_puts_the_even_index_in_the_low_nibble():
    codes = torch.tensor([[0x1, 0x2, 0xA, 0xF], [0x0, 0x8, 0x7, 0x0]], dtype=torch.uint8)
    packed = pack_codes(codes)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[0x21, 0xFA], [0x80, 0x07]]


def test_pack_unpack_round_trip():
    for length in range(10):
        codes = torch.randint(0, 16, (3, 2, length), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
        packed = pack_codes(codes)
        assert packed.shape == (3, 2, (length + 1) // 2)
        assert torch.equal(unpack_codes(packed, length), codes), length


@pytest.mark.parametrize("length", [0, 6, 9, 32])
def test_unpack_refuses_a_length_that_does_not_fit(length):
    with pytest.raises(ValueError, match=rf"4 packed bytes cannot hold {length} .* expected {(length + 1) // 2} bytes"):
        unpack_codes(torch.zeros(2, 4, dtype=torch.uint8), length)
