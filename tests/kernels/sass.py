# SPDX-License-Identifier: Apache-2.0
"""Instructions of machine code that cuobjdump prints, counted: in all, and by what executes them."""

import re
from collections import Counter


#: Of full rate: float32 and pairs of 16 bits.
_FLOATING = {"FADD", "FFMA", "FMUL", "HADD2", "HFMA2", "HMUL2"}
_MULTIPLIER = {"IDP", "IMAD"}
_MEMORY = {
    "ATOMG",
    "BAR",
    "LDC",
    "LDCU",
    "LDG",
    "LDS",
    "LDSM",
    "MUFU",
    "REDG",
    "S2R",
    "S2UR",
    "SHFL",
    "STG",
    "STS",
    "ULDC",
}
_CONTROL = {"BRA", "BSSY", "BSYNC", "CALL", "EXIT", "RET", "WARPSYNC", "YIELD"}


def instructions(sass: str) -> Counter:
    """Instructions by name, without padding."""
    found = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", sass)
    return Counter(name for name in found if name != "NOP")


def counts(sass: str) -> tuple[int, int, int]:
    """Instructions in all, those of [`integer_instructions`], and registers."""
    return instructions(sass).total(), integer_instructions(sass), int(re.search(r"REG:(\d+)", sass)[1])


def integer_instructions(sass: str) -> int:
    """Those of the unit for integers, logic, comparisons and minima, which takes one in two cycles."""
    counts = instructions(sass)
    others = _FLOATING | _MULTIPLIER | _MEMORY | _CONTROL
    return sum(count for name, count in counts.items() if name not in others and not name.startswith("U"))
