# SPDX-License-Identifier: Apache-2.0
"""Experts on the FP8 engine train as on the dense one."""

import pytest
import torch

from hf_mxfp4.gemm import Groups, select_kernel
from hf_mxfp4.gemm.groups import PaddedRows
from hf_mxfp4.numerics import REUSE, GemmScheme, LinearScheme, QuantScheme, Rotation


PLAIN, STOCHASTIC = QuantScheme(), QuantScheme(rounding="stochastic")
#: Engines of the three products.
EXPECTED = {
    "w4a4": ["fp8", "dense", "dense"],
    "w4a4g4": ["fp8", "fp8", "fp8"],
    "w4a4g4 plain": ["fp8", "fp8", "fp8"],
    "w4a4g8 plain": ["fp8", "fp8", "fp8"],
    "w4a4g8": ["fp8", "dense", "dense"],
    "paper_a": ["fp8", "dense", "dense"],
    "paper_b": ["fp8", "fp8", "fp8"],
    "fallback": ["dense", "dense", "dense"],
}


def test_the_engine_of_experts():
    scheme = LinearScheme(GemmScheme(PLAIN, PLAIN))
    assert [select_kernel("fprop", scheme, on, experts=True).name for on in ("sm_80", "sm_90", "sm_100", "gfx950")] == [
        "dense",
        "fp8",
        "fp8",
        "fp8",
    ]
    asked = select_kernel("fprop", scheme, "sm_100", requested="mxfp4", experts=True)
    assert asked.name == "dense" and "packed operands of all experts" in asked.reason
    assert select_kernel("fprop", scheme, "sm_90", torch.float64, experts=True).name == "dense"


@pytest.mark.parametrize(
    ("gemm", "dgrad", "wgrad"),
    [
        ("dgrad", GemmScheme(STOCHASTIC, PLAIN), GemmScheme(PLAIN, PLAIN)),
        ("wgrad", GemmScheme(PLAIN, PLAIN), GemmScheme(STOCHASTIC, PLAIN)),
        ("wgrad", GemmScheme(PLAIN, PLAIN), GemmScheme(PLAIN, PLAIN, Rotation(16, random=True))),
    ],
)
def test_experts_that_draw_random_numbers_are_computed_one_by_one(gemm, dgrad, wgrad):
    scheme = LinearScheme(GemmScheme(PLAIN, PLAIN), dgrad, wgrad)
    for name in ("fprop", "dgrad", "wgrad"):
        engine = select_kernel(name, scheme, "sm_90", experts=True)
        assert engine.name == ("dense" if name == gemm else "fp8"), engine
        assert name != gemm or "random numbers of its own" in engine.reason


def test_a_reused_operand_brings_its_random_numbers():
    scheme = LinearScheme(GemmScheme(STOCHASTIC, PLAIN), GemmScheme(PLAIN, REUSE), GemmScheme(PLAIN, REUSE))
    engines = [select_kernel(name, scheme, "sm_90", experts=True).name for name in ("fprop", "dgrad", "wgrad")]
    assert engines == ["dense", "fp8", "dense"]


def test_blocks_of_padded_rows_belong_to_experts():
    groups = Groups((5, 0, 33, 2))
    padded = PaddedRows(groups, 32, torch.device("cpu"))
    assert padded.offsets.tolist() == [32, 32, 96, 128]
    # Room for 31 rows of zeros after those of each expert, in whole blocks.
    assert len(padded.pad(torch.ones(40, 1))) == 192
    assert torch.equal(padded.pad(torch.arange(40.0)[:, None])[padded.places], torch.arange(40.0)[:, None])


def check(found: dict) -> None:
    """Sums in float32 of exact products; in bfloat16 dense operands are rounded once more, and so is the output."""
    for label, layer in found["experts"].items():
        assert layer["engines"] == EXPECTED[label.split(", ")[0]], label
        bound = 2e-6 if label.endswith("float32") else 2.0**-7
        assert max(layer["distance"].values()) <= bound, (label, layer)
        assert layer["inexact"] == 0, label
    # Both stacks once within the context, and in the pass after it.
    assert found["folds"] == [2, 4]
    assert found["no rows"]
    # Each is run twice: the input itself, its values beside the operand that is made of it, or another's values.
    assert found["saved"] == {"w4a4g8 plain": ["input"] * 2, "w4a4g8": ["full"] * 2, "w4a4g4": ["values"] * 2}


def test_both_engines_train_experts_alike(run_script):
    found = run_script("run_fast_experts.py", "few", interpret=True)
    assert len(found["experts"]) == 3
    check(found)


@pytest.mark.large
def test_both_engines_train_experts_alike_in_all_layouts_and_dtypes(run_script):
    found = run_script("run_fast_experts.py", "all", interpret=True)
    assert len(found["experts"]) == 4 * len(EXPECTED)
    check(found)
