# SPDX-License-Identifier: Apache-2.0
"""Macro bytes of one quantization, which another one takes in the place of a search."""

import pytest
import torch

import mxfp4_kernels


X, BYTES = torch.ones(2, 200), torch.zeros(2, 2, dtype=torch.uint8)


def test_values_by_macro_bytes_are_those_of_a_search(run_script):
    report = run_script("run_macro.py", interpret=True)
    assert report["differences"] == []
    assert all(found["equal"] for found in report["layers"].values())
    # Of the weight there is one search, in the forward pass; without one it is quantized alike in both.
    by_macro = {"fake_quantize_by_macro": 1}
    assert {name: found["calls"] for name, found in report["layers"].items()} == {
        "dense": by_macro | {"fake_quantize": 1, "fake_quantize_with_macro": 1},
        "fp8": by_macro | {"fold_e4m3": 2},
        "mxfp4": by_macro | {"quantize_with_values": 1, "quantize": 1},
        "static": {"fake_quantize": 3},
    }


@pytest.mark.parametrize(
    ("function", "arguments", "options", "words"),
    [
        ("fake_quantize_with_macro", [X], {"macro_block": "row"}, "has no factors of blocks of a fixed length"),
        ("fake_quantize_with_macro", [X], {"macro_block": None}, "has no factors"),
        ("fake_quantize_with_macro", [X], {"macro_search": "blockwise"}, "has no factors"),
        ("fake_quantize_with_macro", [X], {"macro_search": "given"}, "macro_search='given'"),
        ("fake_quantize_by_macro", [X, BYTES], {"macro_block": None}, "has no factors"),
        ("fake_quantize_by_macro", [X, BYTES[:, :1]], {}, r"contiguous uint8 \[2, 2\], got torch.uint8 \[2, 1\]"),
        ("fake_quantize_by_macro", [X, BYTES.int()], {}, "got torch.int32"),
        ("fake_quantize_by_macro", [X, BYTES.t()], {}, "contiguous"),
    ],
)
def test_what_has_no_macro_bytes_is_refused(function, arguments, options, words):
    with pytest.raises(ValueError, match=words):
        getattr(mxfp4_kernels, function)(*arguments, **options)
