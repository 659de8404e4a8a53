# SPDX-License-Identifier: Apache-2.0
"""What tests that compile kernels for several GPUs share: parameters, little in every run and the rest in the long one,
and what code of split sums must be like."""

import re
from collections.abc import Sequence

import pytest
import triton


#: Its version, as two numbers.
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def first_target(*archs: str) -> list:
    """The first in every run, the others in the long one."""
    return [archs[0], *(pytest.param(arch, marks=pytest.mark.large) for arch in archs[1:])]


def few_variants(names: Sequence[str], *archs: str) -> list[tuple]:
    """Target and variants: for the first target those named in every run; for each, all (no name) in the long one."""
    return [(archs[0], names), *(pytest.param(arch, (), marks=pytest.mark.large) for arch in archs)]


def assert_sums_are_there_before_the_arrival(code: str) -> None:
    """Every wave waits for its own stores before the barrier after which one of them counts the program as arrived;
    without that, another program may read sums that are still on their way."""
    arrival = code.index("global_atomic_add")
    stores, barrier = code.rindex("global_store", 0, arrival), code.rindex("s_barrier", 0, arrival)
    assert stores < barrier
    wait = code.rindex("s_waitcnt vmcnt(0)", 0, barrier)
    # On every way to the barrier: nothing is stored, and no way joins or leaves, in between.
    assert stores < wait and not re.search(r"^\.LBB\w+:|s_c?branch|global_store", code[wait:barrier], re.MULTILINE)
