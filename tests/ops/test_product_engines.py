# SPDX-License-Identifier: Apache-2.0
"""Which engine multiplies what, and that all of them train alike."""

import pytest
import torch
from factors import factors_config

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.backends import self_check
from hf_mxfp4.gemm import GemmKernel, gemm_kernel_counts, reset_gemm_kernel_counts, select_kernel
from hf_mxfp4.gemm.tensor_cores import choose
from hf_mxfp4.numerics import FP8, FULL, REUSE, GemmScheme, LinearScheme, QuantScheme, Rotation


PLAIN, MBS = QuantScheme(), QuantScheme("rceil", 128)
GEMMS = ("fprop", "dgrad", "wgrad")


def linear(left, right=None, rotation=None) -> LinearScheme:
    return LinearScheme(GemmScheme(left, left if right is None else right, rotation))


@pytest.mark.parametrize(
    ("scheme", "on_90", "on_100"),
    [
        (PLAIN, "fp8", "mxfp4"),
        (MBS, "fp8", "mxfp4"),
        (QuantScheme("mse", 128, "dynamic"), "fp8", "mxfp4"),
        (QuantScheme("rceil", 128, "blockwise"), "block mantissas", "block mantissas"),
        (QuantScheme("rceil", 32), "macro_block=32", "macro_block=32"),
        (QuantScheme("rceil", "row"), "macro_block='row'", "macro_block='row'"),
        (QuantScheme("rceil", outlier_fallback=0.5), "outlier fallback", "outlier fallback"),
        (QuantScheme("rceil", rounding="stochastic"), "fp8", "mxfp4"),
        (FULL, "full precision", "full precision"),
    ],
)
def test_engine_of_the_forward_product(scheme, on_90, on_100):
    for hardware, expected in (("sm_90", on_90), ("sm_100", on_100), ("gfx950", on_100), ("sm_89", on_90)):
        engine = select_kernel("fprop", linear(scheme, PLAIN if scheme is FULL else None), hardware)
        assert expected in (engine.name, engine.reason) or engine.name == "dense" and expected in engine.reason


def test_hardware_dtypes_rotations_and_what_was_asked_for():
    assert select_kernel("fprop", linear(PLAIN), "sm_80").reason == "sm_80 has no FP8 products"
    assert select_kernel("fprop", linear(PLAIN), "gfx942").name == "dense"
    assert select_kernel("fprop", linear(PLAIN), "cpu").reason == "on the CPU there is nothing faster"
    assert select_kernel("fprop", linear(PLAIN), "interpreter").name == "dense"
    assert select_kernel("fprop", linear(PLAIN), "interpreter", requested="fp8").name == "fp8"
    assert select_kernel("fprop", linear(PLAIN), "sm_90", requested="dense").reason == "engine='dense' was asked for"
    assert select_kernel("fprop", linear(PLAIN), "sm_90", requested="mxfp4").reason == "sm_90 has no MXFP4 products"
    assert select_kernel("fprop", linear(PLAIN), "sm_100", requested="fp8").name == "fp8"
    assert "float64 has more digits" in select_kernel("fprop", linear(PLAIN), "sm_90", torch.float64).reason
    assert select_kernel("fprop", linear(PLAIN, None, Rotation(16)), "sm_90").name == "fp8"
    assert select_kernel("fprop", linear(PLAIN, None, Rotation(128, True)), "sm_100").name == "mxfp4"
    mixed = select_kernel("fprop", linear(PLAIN, MBS), "sm_100")
    assert mixed.name == "fp8"  # native products want macro factors on both sides or on none


@pytest.mark.parametrize(
    ("forward", "dgrad", "wgrad", "expected"),
    [
        (PLAIN, GemmScheme(PLAIN, PLAIN), GemmScheme(PLAIN, PLAIN), ("fp8", "fp8")),
        (PLAIN, GemmScheme(FP8, REUSE), GemmScheme(FP8, REUSE), ("fp8", "fp8")),
        (PLAIN, GemmScheme(FULL, REUSE), GemmScheme(FULL, REUSE), ("grad is in full precision",) * 2),
        (MBS, GemmScheme(FP8, REUSE), GemmScheme(FP8, REUSE), ("macro factors of the reused",) * 2),
        (FULL, GemmScheme(PLAIN, PLAIN), GemmScheme(PLAIN, REUSE), ("fp8", "x is in full precision")),
        (
            PLAIN,
            GemmScheme(FP8, PLAIN, Rotation(16)),
            GemmScheme(PLAIN, REUSE, Rotation(16)),
            ("grad is rotated (deterministic-16) and fp8", "x is rotated (deterministic-16) and as in fprop"),
        ),
        (QuantScheme(block_rows=32), GemmScheme(PLAIN, REUSE), GemmScheme(PLAIN, PLAIN), ("tiles of the re", "fp8")),
    ],
)
def test_engines_of_gradients(forward, dgrad, wgrad, expected):
    left = PLAIN if forward == QuantScheme(block_rows=32) else forward
    scheme = LinearScheme(GemmScheme(left, PLAIN if forward is FULL else forward), dgrad, wgrad)
    for gemm, words in zip(GEMMS[1:], expected, strict=True):
        engine = select_kernel(gemm, scheme, "sm_90")
        assert engine.name == words or engine.name == "dense" and words in engine.reason


@pytest.mark.parametrize(
    ("name", "experts", "broken", "taken"),
    [
        ("fp8", False, "fp8 products", "dense"),
        ("fp8", False, "folds", "dense"),
        ("fp8", False, "fp8 products of experts", "fp8"),
        ("fp8", False, "quantize", "fp8"),
        ("fp8", True, "fp8 products of experts", "dense"),
        ("fp8", True, "folds", "dense"),
        ("fp8", True, "fp8 products", "fp8"),
        ("mxfp4", False, "quantize", "dense"),
        ("mxfp4", False, "mxfp4 products", "dense"),
        ("mxfp4", False, "folds", "mxfp4"),
    ],
)
def test_a_kernel_is_taken_where_all_that_it_needs_works(monkeypatch, name, experts, broken, taken):
    device = torch.device("meta")
    found = {(family, device): "is off by 1" if family == broken else None for family in self_check.FAMILIES}
    monkeypatch.setattr(self_check.verdicts, "_found", found)
    kernel = choose.checked(GemmKernel(name, ""), device, experts)
    assert kernel.name == taken and ("is off by 1" in kernel.reason) == (taken == "dense")


def test_layers_count_their_products():
    reset_gemm_kernel_counts()
    layer = MXFP4Linear(32, 8)
    layer(torch.randn(4, 32)).sum().backward()
    layer(torch.randn(4, 32))
    assert gemm_kernel_counts() == {"fprop": {"dense": 2}, "dgrad": {}, "wgrad": {"dense": 1}, "inexact_blocks": 0}
    reset_gemm_kernel_counts()
    MXFP4Linear(32, 8, config=factors_config(engine="dense"))(torch.randn(4, 32))
    assert gemm_kernel_counts()["fprop"] == {}  # nothing to choose


def test_the_option_is_checked_and_written_where_it_says_something():
    with pytest.raises(ValueError, match="engine='tf32'"):
        factors_config(engine="tf32")
    with pytest.raises(ValueError, match="engine='fp8' has no effect in mode='packed'"):
        factors_config(mode="packed", engine="fp8")
    assert "engine" not in factors_config().to_dict()
    config = factors_config(engine="fp8", outlier_fallback=None)
    assert MXFP4RLConfig.from_dict(config.to_dict()) == config
    assert config.packed().engine == "auto"


#: (config, engine asked for) -> engines of the three products.
EXPECTED = {
    ("w4a4", "fp8"): ["fp8", "dense", "dense"],
    ("w4a4 plain", "fp8"): ["fp8", "dense", "dense"],
    ("w4a4g4", "fp8"): ["fp8", "fp8", "fp8"],
    ("w4a4g4 plain", "fp8"): ["fp8", "fp8", "fp8"],
    ("w4a4g8 plain", "fp8"): ["fp8", "fp8", "fp8"],
    ("w4a4g8 plain, no bias", "fp8"): ["fp8", "fp8", "fp8"],
    ("w4a4g8", "fp8"): ["fp8", "dense", "dense"],
    ("paper_b", "fp8"): ["fp8", "fp8", "fp8"],
    ("random", "fp8"): ["fp8", "fp8", "fp8"],
    ("random reuse", "fp8"): ["fp8", "fp8", "fp8"],
    ("tuned", "fp8"): ["dense", "dense", "dense"],
    ("fallback", "fp8"): ["dense", "dense", "dense"],
    ("w4a4", "mxfp4"): ["mxfp4", "dense", "dense"],
    ("w4a4 plain", "mxfp4"): ["mxfp4", "dense", "dense"],
    ("w4a4g4", "mxfp4"): ["mxfp4", "mxfp4", "mxfp4"],
    ("w4a4g4 plain", "mxfp4"): ["mxfp4", "mxfp4", "mxfp4"],
    ("w4a4g8 plain", "mxfp4"): ["mxfp4", "dense", "dense"],
    ("w4a4g8 plain, no bias", "mxfp4"): ["mxfp4", "dense", "dense"],
    ("w4a4g8", "mxfp4"): ["mxfp4", "dense", "dense"],
    ("paper_b", "mxfp4"): ["mxfp4", "mxfp4", "mxfp4"],
    ("random", "mxfp4"): ["mxfp4", "mxfp4", "dense"],
    ("random reuse", "mxfp4"): ["mxfp4", "dense", "dense"],
    ("tuned", "mxfp4"): ["dense", "dense", "dense"],
    ("fallback", "mxfp4"): ["dense", "dense", "dense"],
}


@pytest.mark.parametrize("what", ["few", pytest.param("all", marks=pytest.mark.large)])
def test_all_engines_train_alike(run_script, what):
    report = run_script("run_engines.py", what, interpret=True)
    assert len(report["layers"]) == len(EXPECTED) * (1 if what == "few" else 2)
    found = {}
    for label, layer in report["layers"].items():
        name, engine, dtype = label.rsplit(", ", 2)
        found[name, engine] = layer["engines"]
        # Sums in float32 of exact products; in bfloat16 dense operands are rounded once more, and so is the output.
        bound = 2e-6 if dtype == "float32" else 2.0**-7
        assert max(layer["distance"].values()) <= bound, (label, layer)
        if set(layer["engines"]) == {"dense"}:
            assert max(layer["distance"].values()) == 0
        assert layer["inexact"] == 0
    assert found == EXPECTED
    # The weight once in the context (and again when it changed), the input each time.
    assert report["folds"] == [2, 5]
    assert report["outliers"] == [3, True]
    # Each layer is run twice.
    assert report["saved"] == {
        "w4a4g8 plain": ["input"] * 2,
        "w4a4g8 plain, no bias": ["folded"] * 2,
        "random reuse": ["values"] * 2,
    }
    # Beside codes for tensor cores that take these, with a bias too: for an FP8 product of Wgrad, or a dense one.
    assert report["saved beside codes"] == {
        "w4a4g8 plain": ["folded"] * 2,
        "w4a4g8": ["full"] * 2,
        "random reuse": ["folded"] * 2,
        "random": ["values"] * 2,
    }
