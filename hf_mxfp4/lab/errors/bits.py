# SPDX-License-Identifier: Apache-2.0
"""Bits that an element takes under a scheme."""

from ...numerics import BLOCK_SIZE, FP8, MXFP8, OperandScheme, QuantScheme, parse_scheme


def bits_per_element(scheme: OperandScheme) -> float:
    """Return the stored bits of an element: 4 of its code, a scale byte for 32, the byte of a macro block, and with
    outlier fallback codes and scales once more; of E4M3 8, of MXFP8 8.25, and of NVFP4 4.5. A factor for a row or a
    tensor counts nothing.
    """
    if not isinstance(scheme, QuantScheme):
        return {FP8: 8.0, MXFP8: 8 + 8 / BLOCK_SIZE}.get(scheme, 4.5)
    plain = 4 + 8 / BLOCK_SIZE
    macro = 8 / scheme.macro_block if isinstance(scheme.macro_block, int) else 0.0
    passes = 1 if scheme.outlier_fallback is None else 2
    return plain * passes + macro


def bits_text(scheme: str) -> str:
    """Return the bits of an element under a scheme in its string form, with two decimals."""
    return f"{bits_per_element(parse_scheme(scheme)):.2f}"
