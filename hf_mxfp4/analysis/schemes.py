# SPDX-License-Identifier: Apache-2.0
"""The schemes that are analysed where nothing is asked for, and schemes as text."""

from ..numerics import parse_scheme


__all__ = ["PAPER_SCHEMES", "parse_scheme"]

#: Plain MXFP4 and the two corrections of arXiv 2605.20402.
PAPER_SCHEMES = ("rceil", "rceil+mbs128-static", "rceil+mbs128-static+of0.5")
