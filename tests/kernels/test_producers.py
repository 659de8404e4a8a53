# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and SwiGLU that quantize: results interpreted, the interface, tiles, and what the compiler makes of them."""

import re

import pytest
import torch
from compile_targets import first_target
from test_compile_ahead import ELEMENTS_PER_THREAD, FAST_MATH, FMA_PER_PASS, SHARED_MEMORY

import mxfp4_kernels
from mxfp4_kernels.quantization.producers import norm_tile


def test_interpreted_kernels_follow_torch_and_equal_the_definition(run_script):
    report = run_script("run_producers.py", "every", interpret=True)
    assert report["mismatches"] == []
    assert report["cases"] == {"norm": 7, "swiglu": 8, "layouts": 29, "models": 9}


X, W = torch.ones(4, 40), torch.ones(40)
BOTH = (
    lambda x, **options: mxfp4_kernels.rms_norm_quantize(x, W, **options),
    lambda x, **options: mxfp4_kernels.swiglu_quantize(x, X, **options),
)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"outputs": ()}, ValueError, r"outputs=\(\) must be"),
        ({"outputs": "packed"}, ValueError, "outputs='packed' must be a tuple"),
        ({"outputs": ("packed", "codes")}, ValueError, "'packed', 'values'"),
        ({"scale_rule": "up"}, ValueError, "scale_rule='up'"),
        ({"macro_block": 48}, ValueError, "macro_block=48"),
        ({"seed": 3}, ValueError, "seed has no effect"),
        ({"rounding": "stochastic"}, TypeError, "needs an integer as its seed"),
        ({"rotation": 8}, ValueError, "rotation=8"),
        ({"dtype": torch.float64}, TypeError, "float64"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("function", BOTH, ids=["norm", "swiglu"])
def test_wrong_options_raise(function, options, error, words):
    with pytest.raises(error, match=words):
        function(X, **options)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": [1.0]}, TypeError, "list"),
        ({"x": X.double()}, TypeError, "float64"),
        ({"x": torch.tensor(1.0)}, ValueError, "scalar"),
        ({"weight": None}, TypeError, "weight needs a tensor, got NoneType"),
        ({"weight": W.double()}, TypeError, "float64"),
        ({"weight": W[1:]}, ValueError, r"weight has the shape \[39\]; it must be \[40\]"),
        ({"weight": W.to("meta")}, ValueError, "weight is on meta, the tensor is on cpu; move it there"),
        ({"residual": X.half()}, TypeError, "residual must be torch.float32, got torch.float16"),
        ({"residual": W}, ValueError, r"residual has the shape \[40\]; it must be \[4, 40\]"),
        ({"noise": W.bfloat16()}, TypeError, "noise must be torch.float32"),
        ({"noise": X}, ValueError, r"noise has the shape \[4, 40\]"),
        ({"eps": -1e-6}, ValueError, "eps=-1e-06"),
        ({"eps": float("nan")}, ValueError, "eps=nan"),
        ({"eps": None}, ValueError, "eps=None"),
    ],
)
def test_norm_refuses_what_does_not_fit(change, error, words):
    with pytest.raises(error, match=words):
        mxfp4_kernels.rms_norm_quantize(**{"x": X, "weight": W} | change)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None,), TypeError, "NoneType"),
        ((X[:, :39],), ValueError, "even last axis, got 39"),
        ((X, X.half()), TypeError, "up must be torch.float32"),
        ((X, X[:, :20]), ValueError, r"up has the shape \[4, 20\]; it must be \[4, 40\]"),
        ((X, X.to("meta")), ValueError, "up is on meta"),
    ],
)
def test_swiglu_refuses_what_does_not_fit(arguments, error, words):
    with pytest.raises(error, match=words):
        mxfp4_kernels.swiglu_quantize(*arguments)


@pytest.mark.parametrize("function", BOTH, ids=["norm", "swiglu"])
def test_gpu_tensors_are_needed(function, monkeypatch):
    from mxfp4_kernels.quantization import launch as _launch

    monkeypatch.setattr(_launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="CPU"):
        function(X)


@pytest.mark.parametrize("unit", [32, 64, 128, 256])
def test_tiles_of_a_norm_cover_rows_with_little_padding(unit):
    for length in (*range(1, 700), 896, 1536, 2048, 3584, 4096, 5120, 8192, 12288, 18944, 29568, 2**20 + 1):
        rows, cols, steps = norm_tile(length, unit)
        assert cols % unit == 0 and cols & (cols - 1) == rows & (rows - 1) == 0
        assert (steps - 1) * cols < length <= steps * cols
        assert 2048 <= rows * cols <= 8192
        if length >= 2048:
            assert steps * cols <= max(1.15 * length, length + unit)


def test_a_macro_block_of_a_whole_row_is_one_tile():
    assert norm_tile(5120, 8192) == (1, 8192, 1)
    assert norm_tile(12288, 16384) == (1, 16384, 1)


def is_norm(name: str) -> bool:
    return name.startswith("norm")


@pytest.mark.parametrize("arch", first_target("90", "80", "100", "120"))
def test_cuda(run_script, arch):
    report = run_script("run_producer_compiler.py", "cuda", arch, interpret=False)
    assert len(report) == 7
    for name, asm in report.items():
        ptx = asm["ptx"]
        assert not FAST_MATH.search(asm["llir"]), name
        assert ".ftz" not in ptx and ".local" not in ptx, name
        # The exponential and the quotient by it are the only ones that are not correctly rounded.
        assert (".approx" in ptx) == ("div.full.f32" in ptx) == (not is_norm(name)), name
        assert ("sqrt.rn.f32" in ptx) == is_norm(name), name
        assert re.search(r"STACK:0\b.*LOCAL:0\b", asm["sass"]), name
        assert asm["shared"] <= SHARED_MEMORY, name
        assert "ld.global.v4.b32" in ptx, name
        assert not re.search(r"\bld\.global\.b(16|32)\b", ptx), name
        assert ("st.global.v2.b32" if "values" not in name else "st.global.v4.b32") in ptx, name
    for name in ("norm", "swiglu"):
        # Two 16-bit roundings before the quantizer, nothing contracted.
        assert report[name]["ptx"].count("cvt.rn.bf16x2.f32") == ELEMENTS_PER_THREAD
        # From sm_100 on two fit into one instruction.
        fused = re.findall(r"\bfma\.rn\.f32(?:x2)?\b", report[name]["ptx"])
        assert sum(1 + one.endswith("x2") for one in fused) == FMA_PER_PASS * ELEMENTS_PER_THREAD
        # On the slow unit for single conversions none.
        assert not re.search(r"\bF2F\b", report[name]["sass"])
        assert arch != "90" or int(re.search(r"REG:(\d+)", report[name]["sass"])[1]) <= 64
    # The inputs of a row that one tile holds are read once: of x and weight, two loads of 16 bytes each.
    assert len(re.findall(r"\bld\.global", report["norm"]["ptx"])) == 4


@pytest.mark.parametrize("arch", first_target("gfx950", "gfx942"))
def test_hip(run_script, arch):
    report = run_script("run_producer_compiler.py", "hip", arch, interpret=False)
    assert len(report) == 7
    for name, asm in report.items():
        code = asm["amdgcn"]
        assert not FAST_MATH.search(asm["llir"]), name
        assert re.search(r"\.amdhsa_float_denorm_mode_32 3\b", code), name
        assert re.search(r"\.vgpr_spill_count: +0\b", code), name
        assert re.search(r"ScratchSize: 0\b", code), name
        assert asm["shared"] <= SHARED_MEMORY, name
        assert re.search(r"\b(global|buffer)_load_dwordx4\b", code), name
        assert not re.search(r"\b(global|buffer)_load_(ushort|short|ubyte)", code), name
