# SPDX-License-Identifier: Apache-2.0
"""Parameters of tests that compile kernels for several GPUs: little in every run, the rest in the long one."""

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
