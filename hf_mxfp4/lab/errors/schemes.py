# SPDX-License-Identifier: Apache-2.0
"""The schemes that are analysed where nothing is asked for, schemes as text, and the bits that they take."""

from ...numerics import BLOCK_SIZE, QuantScheme, parse_scheme


__all__ = ["PAPER_SCHEMES", "bits_per_element", "parse_scheme"]

#: Plain MXFP4 and the two corrections of arXiv 2605.20402.
PAPER_SCHEMES = ("rceil", "rceil+mbs128-static", "rceil+mbs128-static+of0.5")


def bits_per_element(scheme: QuantScheme) -> float:
    """Stored bits of an element: 4 of its code, a scale byte for 32, the byte of a macro block, and with outlier
    fallback codes and scales once more, of the share of blocks that has one. A factor for a whole row counts nothing.
    """
    plain = 4 + 8 / BLOCK_SIZE
    macro = 8 / scheme.macro_block if isinstance(scheme.macro_block, int) else 0.0
    share = 0.0 if scheme.outlier_fallback is None else 1.0 if scheme.fallback_rate is None else scheme.fallback_rate
    return plain * (1 + share) + macro
