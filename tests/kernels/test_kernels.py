# SPDX-License-Identifier: Apache-2.0
"""The kernels, interpreted, against the eager definition, float64 and eager layers; their interface and counters; and
what compilers make of them, as they are launched, for GPUs that need not be there."""

import contextlib
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from stub_gpu import DEVICE, Launch, stub_gpu

import mxfp4_kernels
from hf_mxfp4 import numerics
from hf_mxfp4.ops.choice import HAS_FP8_ON_CPU
from mxfp4_kernels import Packed, Scheme, Side, linear_w4a16
from mxfp4_kernels.common.packed import output_packed
from mxfp4_kernels.common.tensors import output_tensor
from mxfp4_kernels.decode import counters
from mxfp4_kernels.decode.config import Gpu, tile_config


@pytest.mark.parametrize(
    ("what", "cases"), [("schemes", 33), ("pairs", 24), ("layouts", 29), ("sides", 31), ("fp8", 57), ("outputs", 14)]
)
def test_interpreted_kernels_equal_eager_bit_for_bit(run_script, what, cases):
    report = run_script("run_quantize.py", what, interpret=True)
    assert report == {"cases": cases, "mismatches": []}


@pytest.mark.parametrize(("what", "cases"), [("columns", 44), ("gradients", 27)])
def test_interpreted_operands_of_fp8_products_are_rounded_once(run_script, what, cases):
    report = run_script("run_fp8.py", what, interpret=True)
    assert report == {"cases": cases, "mismatches": []}


def test_any_gradient_is_folded_and_rounded(run_script):
    assert run_script("run_fp8.py", "property", interpret=True) == {}


@pytest.mark.large
def test_any_shape_scheme_and_range(run_script):
    assert run_script("run_quantize.py", "property", interpret=True) == {}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"scale_rule": "ceil"}, "ceil"),
        ({"macro_block": "row"}, "row"),
        ({"macro_block": 96}, "96"),
        ({"macro_search": "block_mantissas", "macro_block": 64}, "needs macro_block=128, got macro_block=64"),
        ({"macro_search": "block_mantissas_fp8", "macro_block": 256}, "needs macro_block=128, got macro_block=256"),
        ({"block_rows": 16}, "block_rows=16"),
        ({"macro_search": "hybrid"}, "hybrid"),
        ({"outlier_fallback": 0}, "outlier_fallback=0"),
        ({"outlier_fallback": 1.5}, "1.5"),
        ({"outlier_fallback": True}, "True"),
    ],
)
def test_an_unsupported_scheme_has_a_reason_and_raises(change, word):
    options = {"scale_rule": "rceil", "macro_block": 128, "macro_search": "static", "outlier_fallback": 0.5} | change
    assert word in mxfp4_kernels.unsupported_scheme(**options)
    with pytest.raises(ValueError, match=word):
        Scheme(**options)


X = torch.ones(4, 40)


@pytest.mark.parametrize(
    ("side", "error", "words"),
    [
        (Side(seed=1.5), TypeError, "1.5"),
        (Side(seed=2**64), ValueError, "must be in"),
        (Side(rotation=8), ValueError, "rotation=8"),
        (Side(signs=torch.ones(40)), ValueError, "no effect without a rotation"),
        (Side(None, 16, torch.ones(40)), ValueError, r"\[40\]; the rotated axis has 48 elements"),
        (Side(None, 16, torch.ones(48, device="meta")), ValueError, "meta.*cpu; move them"),
    ],
)
def test_wrong_sides_raise(side, error, words):
    with pytest.raises(error, match=words):
        side.checked(X, 40)


COLUMNS = {"codes": 80, "scale": 5, "macro": 2, "residual_codes": 80, "residual_scale": 5}
PACKED = {name: torch.zeros(3, columns, dtype=torch.uint8) for name, columns in COLUMNS.items()}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"codes": torch.zeros(3, 80)}, TypeError, "codes must be uint8"),
        ({"codes": torch.zeros(3, 81, dtype=torch.uint8)}, ValueError, r"codes has the shape \[3, 81\].*\[3, 80\]"),
        ({"scale": torch.zeros(2, 5, dtype=torch.uint8)}, ValueError, r"scale has the shape \[2, 5\].*\[3, 5\]"),
        ({"macro": None}, ValueError, "macro is missing"),
        ({"residual_scale": None}, ValueError, "residual_scale is missing"),
        ({"scale": torch.zeros(3, 5, dtype=torch.uint8, device="meta")}, ValueError, "scale is on meta"),
    ],
)
def test_packed_tensors_that_do_not_fit_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        mxfp4_kernels.dequantize(Packed(**PACKED | change), 160, Scheme("rceil", 128, "static", 0.5), torch.float32)


@pytest.mark.parametrize(
    ("has", "scheme"), [("macro", Scheme(outlier_fallback=0.5)), ("residual_codes", Scheme("rceil", 128))]
)
def test_parts_that_a_scheme_does_not_have_are_refused(has, scheme):
    with pytest.raises(ValueError, match=f"{has} is given"):
        Packed(**PACKED).check(160, scheme)


@pytest.mark.parametrize(
    "name",
    [
        "fake_quantize",
        "fake_quantize_rows_and_columns",
        "quantize",
        "quantize_rows_and_columns",
        "to_fp8",
        "to_fp8_rows_and_columns",
        "gradient_to_fp8",
    ],
)
def test_wrong_inputs_raise(name):
    function = getattr(mxfp4_kernels, name)
    with pytest.raises(TypeError, match="list"):
        function([1.0])
    with pytest.raises(TypeError, match="float64 is not supported"):
        function(torch.zeros(2, 32).double())
    with pytest.raises(ValueError, match="axes, got 0"):
        function(torch.tensor(1.0))
    with pytest.raises(ValueError, match="needs a GPU tensor"):
        function(X)


def test_wrong_outputs_and_shapes_raise():
    with pytest.raises(ValueError, match="at least 2 axes, got 1"):
        mxfp4_kernels.quantize(torch.ones(32), Scheme(block_rows=32))
    with pytest.raises(TypeError, match="float64"):
        mxfp4_kernels.dequantize(Packed(*[None] * 5), 32, Scheme(), torch.float64)
    with pytest.raises(TypeError, match="must be uint8"):
        mxfp4_kernels.nvfp4_scales(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="needs a GPU tensor"):
        mxfp4_kernels.nvfp4_scales(PACKED["scale"], PACKED["macro"])
    elements = torch.zeros(2, 8, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="scales uint8"):
        mxfp4_kernels.from_fp8(elements, torch.ones(2, 1), torch.float32)
    with pytest.raises(ValueError, match="need a scale byte each row"):
        mxfp4_kernels.from_fp8(elements, torch.ones(1, 1, dtype=torch.uint8), torch.float32)


@pytest.fixture
def gpu() -> Iterator[list[Launch]]:
    with stub_gpu() as launches:
        yield launches


def test_only_contiguous_matrices_of_fp8_are_transposed(gpu):
    elements = torch.empty(4, 6, dtype=torch.float8_e4m3fn, device=DEVICE)
    with pytest.raises(TypeError, match="needs a float8_e4m3fn tensor"):
        mxfp4_kernels.transpose_fp8(elements.view(torch.uint8))
    for unfit in (elements[0], elements.t(), elements[:, ::2]):
        with pytest.raises(ValueError, match="contiguous matrices are needed"):
            mxfp4_kernels.transpose_fp8(unfit)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"grad": torch.empty(2, 32, 16, device="meta")}, ValueError, r"\[M, N\] is needed, got \[2, 32, 16\]"),
        ({"token_scales": torch.empty(16, device="meta")}, ValueError, "token_scales must be 32 contiguous numbers"),
        ({"token_scales": torch.empty(32, 2, device="meta")[:, 0]}, ValueError, "token_scales must be 32 contiguous"),
        ({"weight_scales": torch.empty(16, dtype=torch.uint8, device="meta")}, TypeError, "must be float32"),
        ({"out": (None,) * 5 + (torch.empty(1, device="meta"),)}, ValueError, "given without scales"),
    ],
)  # fmt: skip
def test_gradients_and_scales_that_do_not_fit_are_refused(gpu, changes, error, words):
    with pytest.raises(error, match=words):
        mxfp4_kernels.gradient_to_fp8(**{"grad": torch.empty(32, 16, device=DEVICE)} | changes)


def test_as_many_largest_magnitudes_as_matrices_are_needed(gpu):
    x = torch.empty(3, 32, 16, device=DEVICE)
    with pytest.raises(ValueError, match="3 matrices need as many largest magnitudes, got 1"):
        mxfp4_kernels.to_fp8_rows_and_columns(x, top=torch.empty((), device=DEVICE))


def test_operands_of_the_backward_products_take_three_launches(gpu):
    grad = torch.empty(64, 32, dtype=torch.bfloat16, device=DEVICE)
    result = mxfp4_kernels.gradient_to_fp8(
        grad, torch.empty(64, 1, device=DEVICE), torch.empty(32, 1, device=DEVICE), n_columns=48
    )
    assert len(gpu) == 3
    assert [list(part.shape) for part in result] == [[64, 32], [64, 1], [32, 64], [32, 1], [48], [48]]


def test_rows_and_columns_take_one_launch(gpu):
    mxfp4_kernels.to_fp8_rows_and_columns(torch.empty(64, 32, dtype=torch.bfloat16, device=DEVICE))
    assert len(gpu) == 1


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (torch.zeros(4, 40), TypeError, "must be torch.bfloat16"),
        (torch.zeros(4, 41, dtype=torch.bfloat16), ValueError, "has the shape"),
        (torch.zeros(4, 40, dtype=torch.bfloat16, device="meta"), ValueError, "is on meta"),
        (torch.zeros(40, 4, dtype=torch.bfloat16).mT, ValueError, "must be contiguous"),
    ],
)
def test_tensors_to_write_that_do_not_fit_are_refused(out, error, words):
    with pytest.raises(error, match=words):
        output_tensor(out, (4, 40), torch.bfloat16, torch.device("cpu"))


def test_codes_and_scales_to_write_need_the_shape_of_the_result():
    scheme = Scheme("rceil", 128, "static", 0.5)
    with pytest.raises(ValueError, match="codes of out has the shape"):
        output_packed(Packed(**PACKED), (4, 160), scheme, torch.device("cpu"))


def test_codes_and_scales_to_write_must_be_contiguous():
    scheme = Scheme("rceil", 128, "static", 0.5)
    transposed = torch.zeros(5, 3, dtype=torch.uint8).mT
    with pytest.raises(ValueError, match="scale of out must be contiguous"):
        output_packed(Packed(**PACKED | {"scale": transposed}), (3, 160), scheme, torch.device("cpu"))


def test_layers_on_the_kernels_are_those_on_the_eager_functions(run_script):
    scripts = run_script("run_layers.py", interpret=True)
    report = scripts["layers"]
    for name, found in report.items():
        # Quantized values are the same bits. Products on codes round once where those of values round twice.
        bound = 0.02 if name in ("packed", "packed, w4a8", "packed, rotated", "experts") else 0
        assert max(found["differences"]) <= bound, (name, found)
    launches = {name: set(found["launches"]) for name, found in report.items()}
    assert report["experts"]["launches"]["packed product"] == 2
    assert "dequantize" not in launches["experts"]
    assert "packed product" in launches["packed"]
    assert "fake_quantize_rows_and_columns" in launches["w4a4g4"]
    assert all({"to_fp8", "from_fp8"} <= launches[name] for name in ("w4a8", "packed, w4a8"))
    assert {"to_fp8_rows_and_columns", "from_fp8"} <= launches["w4a8g8"]
    in_fp8 = [found for name, found in report.items() if name.startswith("w4a8g8 in FP8")]
    assert len(in_fp8) == 2 * HAS_FP8_ON_CPU
    for found in in_fp8:
        assert found["launches"]["to_fp8_rows_and_columns"] >= 2  # of x and of W
        assert found["launches"]["gradient_to_fp8"] == 1
    assert all("fake_quantize" in launches[name] for name in ("w4a4", "paper_a", "paper_b"))
    few, many = scripts["joined"]["few"], scripts["joined"]["many"]
    assert few == {"equal": True, "products": [{"packed product": 3}, {"packed product": 1}]}
    assert many == {"equal": True, "products": [{"dequantize": 3}, {"dequantize": 1}]}


def test_interpreted_products_are_those_of_the_exact_weight(run_script):
    report = run_script("run_decode.py", "few", interpret=True)
    assert {name: wrong for name, wrong in report.items() if wrong is not None} == {}
    assert len(report) == 62


STATIC = Scheme("rceil", 128)
WEIGHT = numerics.quantize(torch.ones(4, 64), macro_block=128)
BF16 = torch.ones(2, 64).bfloat16()


def product_of(
    x: object = BF16, length: int = 64, scheme: Scheme = STATIC, bias=None, offsets=None, **parts: torch.Tensor
):
    packed = Packed(WEIGHT.codes, WEIGHT.scale, WEIGHT.macro)._replace(**parts)
    return linear_w4a16(x, packed, length, scheme, bias, offsets)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "bfloat16, not torch.float32", {"x": torch.ones(2, 64)}),
        (ValueError, "last axis must be 64", {"x": BF16[:, 1:]}),
        (ValueError, "do not fill words", {"length": 60}),
        (TypeError, "codes must be uint8", {"codes": WEIGHT.codes.int()}),
        (TypeError, "the bias is torch.float32", {"bias": torch.ones(4)}),
        (ValueError, "the bias has the shape", {"bias": torch.ones(5).bfloat16()}),
        (ValueError, "codes need 3 axes", {"offsets": torch.ones(4, dtype=torch.int32)}),
        (ValueError, "several devices", {"x": BF16.to("meta")}),
        (ValueError, "needs a GPU tensor", {}),
    ],
)
def test_wrong_arguments_are_refused(error, message, changes):
    with pytest.raises(error, match=message):
        product_of(**changes)


@pytest.fixture
def cuda_streams(monkeypatch):
    """A GPU that is not there: the state of its current stream, and the threads that reserved memory on it."""
    state = SimpleNamespace(stream=7, is_capturing=False, threads=[], synchronized=0)

    def zeros(count, *, dtype, device):
        state.threads.append(threading.get_ident())
        return torch.empty(count, dtype=dtype).zero_()

    def synchronize():
        state.synchronized += 1

    stream = SimpleNamespace(synchronize=synchronize)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: state.stream))
    monkeypatch.setattr(counters, "driver", driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch, "zeros", zeros)
    return state


CUDA = torch.device("cuda", 0)


def test_counters_are_never_allocated_by_the_launching_thread(cuda_streams):
    """Its allocations may go to the memory of a CUDA graph that is warmed up, which later graphs overwrite."""
    found = counters.Counters().zeros(3, CUDA)
    assert found.numel() >= 3
    assert not found.any()
    assert threading.get_ident() not in cuda_streams.threads
    assert cuda_streams.synchronized == 1  # cleared before any graph can run


def test_launches_of_a_stream_share_counters(cuda_streams):
    of_layer = counters.Counters()
    first = of_layer.zeros(3, CUDA)
    assert of_layer.zeros(300, CUDA) is first
    assert of_layer.zeros(5000, CUDA).numel() >= 5000
    cuda_streams.stream = 8
    assert of_layer.zeros(3, CUDA).data_ptr() != first.data_ptr()


def test_captured_launches_have_counters_of_their_own_however_many_graphs_there_are(cuda_streams):
    of_layer = counters.Counters()
    of_stream = of_layer.zeros(3, CUDA)
    cuda_streams.is_capturing = True
    captured = [of_layer.zeros(3, CUDA) for _ in range(100)]
    assert len(cuda_streams.threads) == 1
    assert {counter.data_ptr() for counter in captured} == {captured[0].data_ptr()}
    assert captured[0].data_ptr() != of_stream.data_ptr()


def test_a_graph_that_is_captured_first_clears_its_own_counters(cuda_streams):
    cuda_streams.is_capturing = True
    found = counters.Counters().zeros(3, CUDA)
    assert found.numel() == 3
    assert cuda_streams.threads == [threading.get_ident()]


def test_grids_are_as_large_as_gpus_allow():
    """CUDA and HIP launch 2**16 - 1 programs along the second and the third axis of a grid, and 2**31 - 1 along the
    first one."""
    with stub_gpu() as launches:
        matrices = torch.empty(140_000, 2, 64, dtype=torch.bfloat16, device=DEVICE)
        mxfp4_kernels.quantize(matrices.mT)
        mxfp4_kernels.fake_quantize_rows_and_columns(matrices)
        mxfp4_kernels.fake_quantize(matrices, Scheme(block_rows=32))
        mxfp4_kernels.nvfp4_scales(torch.empty(2, 2**21, dtype=torch.uint8, device=DEVICE))
        mxfp4_kernels.to_fp8_rows_and_columns(matrices)
        mxfp4_kernels.gradient_to_fp8(matrices.view(-1, 64))
    assert all(max(launch.grid[1:], default=1) < 2**16 for launch in launches)
    matrices_of = [(launch.arguments[6], launch.grid[1]) for launch in launches if len(launch.grid) == 2]
    assert matrices_of == [(0, 65535), (65535, 65535), (131070, 8930)] * 3


# ---- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "rows", "has_fallback", "stages"),
    [("90", 1, False, 4), ("90", 16, False, 4), ("90", 1, True, 3), ("120", 1, False, 3), ("gfx942", 1, False, 2)],
)
def test_two_steps_are_loaded_ahead_where_all_programs_have_room_for_them(arch, rows, has_fallback, stages):
    gpu = Gpu(arch, 132, {"90": 232448, "120": 101376, "gfx942": 65536}[arch])
    assert tile_config(rows, has_fallback, gpu).num_stages == stages


#: Variants that every run compiles; the long one compiles all, for all targets.
FEW = ("values", "values half", "codes mantissas", "decode static", "to_fp8 both", "gradient folded")
FEW_HIP = ("decode mantissas",)
#: Variants that divide nothing.
NO_DIVISION = (
    "values", "values half", "values with residual", "values tiles", "values stochastic rotated", "values columns",
    "values mantissas", "codes mantissas", "codes three mantissas", "codes both",
)  # fmt: skip
#: Inline PTX, which no interpreter runs: instructions in the code of one thread, by variant. If they change, run
#: `tests/gpu` on a GPU.
INLINE_PTX = {
    "values": {"max.NaN.bf16x2": 12, "min.bf16x2": 32, "fma.rn.bf16x2": 64, "fma.rn.f16x2": 16},
    "codes mantissas": {
        "max.NaN.bf16x2": 12,
        "min.bf16x2": 16,
        "fma.rn.bf16x2": 16,
        "fma.rn.f16x2": 128,
        "prmt.b32": 96,
        "dp4a.u32.s32": 32,
        "dp4a.u32.u32": 64,
    },
}
#: Bytes of registers that do not fit, at most.
MOST_STACK = 24
#: Bytes of shared memory that one program may have.
SHARED = {"80": 166912, "90": 232448, "100": 232448, "120": 101376, "gfx942": 65536, "gfx950": 163840}
# An arithmetic instruction that the optimizer may contract, reassociate, approximate or flush.
FAST_MATH = re.compile(r"\bf(?:add|sub|mul|div|neg) (?:[a-z]+ )*?(?:fast|contract|reassoc|arcp|afn|nsz)\b")


def assert_exact_arithmetic(name: str, llir: str):
    """Of quantization: no product of which a bit counts is contracted into an fma."""
    assert "!fpmath" not in llir and not FAST_MATH.search(llir), name


@pytest.mark.parametrize(
    ("arch", "names"),
    [("90", FEW), *(pytest.param(arch, (), marks=pytest.mark.large) for arch in ("80", "90", "100", "120"))],
)
def test_cuda(run_script, arch, names):
    report = run_script("run_compiler.py", arch, *names, interpret=False)
    assert len(report) == (len(names) or 36)
    for name, asm in report.items():
        ptx = asm["ptx"]
        stack, local = re.search(r"STACK:(\d+).*LOCAL:(\d+)", asm["sass"]).groups()
        assert int(stack) <= MOST_STACK and local == "0" and ".local" not in ptx, name
        assert asm["shared"] <= SHARED[arch], name
        if name.startswith("decode"):
            assert "fma.rn.bf16x2" in ptx and re.search(r"wgmma|mma\.sync|tcgen05\.mma", ptx), name
            # Sums of splits are read where other multiprocessors wrote them, after all threads wrote theirs.
            assert "atom.acq_rel.gpu.global.add" in ptx or "atom.global.gpu.acq_rel.add" in ptx, name
            assert re.search(r"ld\.global\.cg", ptx), name
            continue
        assert_exact_arithmetic(name, asm["llir"])
        assert ".ftz" not in ptx and ".approx" not in ptx, name
        if name.startswith(("values", "codes")):
            assert ("div.rn.f32" in ptx) == (name not in NO_DIVISION), name
    for name, instructions in INLINE_PTX.items():
        ptx = report[name]["ptx"]
        assert {op: len(re.findall(rf"\b{re.escape(op)}\b", ptx)) for op in instructions} == instructions, name
    # 16 bytes at a time, and no product in float32.
    values = report["values"]["ptx"]
    assert "ld.global.v4.b32" in values
    assert "st.global.v4.b32" in values
    assert "fma.rn.f32" not in values
    for name, elements in (("to_fp8 both", 32), ("gradient folded", 64)):  # of a thread
        fp8 = report[name]["ptx"]
        # Both sides 16 bytes at a time; two elements in an instruction where the GPU has it.
        assert "ld.global.v4.b32" in fp8, name
        assert len(re.findall(r"st\.global\.v4\.b32", fp8)) == 2 * elements // 16, name
        assert not re.search(r"st\.global\.b8", fp8), name
        assert ("cvt.rn.satfinite.e4m3x2.f32" in fp8) == (arch != "80"), name
    # Two fused multiply-adds for each of 32 elements, those written out in the kernel.
    assert len(re.findall(r"\bfma\.rn\.f32", report["values half"]["ptx"])) == 64


@pytest.mark.parametrize(
    ("arch", "names"),
    [("gfx942", FEW_HIP), *(pytest.param(arch, (), marks=pytest.mark.large) for arch in ("gfx942", "gfx950"))],
)
def test_hip(run_script, arch, names):
    report = run_script("run_compiler.py", arch, *names, interpret=False)
    for name, asm in report.items():
        code = asm["amdgcn"]
        # Mode 3: subnormals are read and written as they are.
        assert re.search(r"\.amdhsa_float_denorm_mode_32 3\b", code), name
        assert re.search(r"\.vgpr_spill_count: +0\b", code) and re.search(r"ScratchSize: 0\b", code), name
        assert asm["shared"] <= SHARED[arch], name
        if name.startswith("decode"):
            assert re.search(r"v_mfma_f32_\w+_?bf16", code), name
            assert_sums_are_there_before_the_arrival(code)
        else:
            assert_exact_arithmetic(name, asm["llir"])


def assert_sums_are_there_before_the_arrival(code: str) -> None:
    """Every wave waits for its own stores before the barrier after which one of them counts the program as arrived;
    without that, another program may read sums that are still on their way."""
    before, arrival, _ = code.partition("global_atomic_add")
    assert arrival
    until_barrier, _, _ = before.rpartition("s_barrier")
    until_wait, wait, between = until_barrier.rpartition("s_waitcnt vmcnt(0)")
    assert wait
    assert re.search(r"(?:global|buffer)_store", until_wait)
    # On every way to the barrier: nothing is stored, and no way joins or leaves, in between.
    assert not re.search(r"^\.LBB\w+:|s_c?branch|(?:global|buffer)_store", between, re.MULTILINE)
