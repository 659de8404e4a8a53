# SPDX-License-Identifier: Apache-2.0
"""Equality of nested states, tensors to the bit."""

import math

import torch


def assert_same(a, b):
    """Equal types, keys, lengths and values throughout; NaN equals NaN."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
