# SPDX-License-Identifier: Apache-2.0
"""The grouped products of experts: interpreted against float64, their interface, and what compilers make of them."""

import re

import pytest
import torch
from compile_targets import TRITON, assert_sums_are_there_before_the_arrival

import mxfp4_kernels
from mxfp4_kernels.gemm.grouped import matmul, packed


#: Bytes of shared memory that one program may have.
SHARED = {"80": 166912, "90": 232448, "100": 232448, "120": 101376, "gfx942": 65536, "gfx950": 163840}


@pytest.mark.parametrize(("what", "cases"), [("dense", 53), ("packed", 22), ("e4m3", 19)])
@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(other, marks=pytest.mark.large) for other in ("float16", "float32"))]
)
def test_interpreted_products_are_those_of_each_expert(run_script, what, dtype, cases):
    report = run_script("run_grouped.py", what, dtype, interpret=True)
    assert {label: value for label, value in report.items() if not value <= 1} == {}
    assert len(report) == cases


def test_experts_on_the_kernels_are_experts_one_after_the_other(run_script):
    report = run_script("run_grouped_experts.py", interpret=True)
    together = {"grouped_matmul": 2, "grouped_wgrad": 1, "grouped_sum": 1}
    for scheme in ("default", "w4a4g8", "macro", "paper_b", "full"):
        found = report.pop(scheme)
        assert found["launches"] == together and not found["read"] and found["zero"], scheme
        assert max(found["differences"]) < 1e-5, scheme
    one_by_one = report.pop("stochastic")
    assert one_by_one["read"] and one_by_one["launches"] == {"grouped_matmul": 1, "grouped_sum": 1}
    assert max(one_by_one["differences"]) < 1e-5
    trained, packed = report.pop("MXFP4Experts"), report.pop("MXFP4PackedExperts")
    assert trained["launches"] == {name: 2 * count for name, count in together.items()}
    assert max(trained["differences"]) < 1e-2
    # Weights in macro blocks are rounded to bfloat16 by the layer without kernels alone.
    assert packed["launches"] == {"grouped_matmul_packed": 2, "grouped_matmul": 2, "grouped_sum": 2}
    assert max(packed["differences"]) < 3e-2
    rollouts = report.pop("rollouts")
    # On codes where they are read, each matrix quantized once; and the values of the step's codes after its rollout.
    assert {name: found[:2] for name, found in rollouts.items()} == {
        "auto": [{"grouped_matmul_packed": 4}, 2 * 4],
        "dense": [{"grouped_matmul": 4}, 2 * 4],
        "of a step": [{"grouped_matmul_packed": 4}, 2 * 4],
        "after it": [{"grouped_matmul": 4}, 0],
    }
    assert max(found[2] for found in rollouts.values()) < 1e-5
    assert rollouts["dense"][2] == rollouts["after it"][2] == 0
    assert not report


#: Variants that every GPU must take, and those that every GPU with E4M3 must; `make test-all` compiles them for all
#: targets, and all variants for sm_90.
COMMON = ("matmul 16x64x64x4x3", "wgrad 32x64x64x4x2", "packed 16x64x4x3", "packed fallback", "packed whole")
E4M3 = ("e4m3 64x128x4x3", "e4m3 wgrad 64x64x4x2")
#: Those that every run compiles.
FEW = ("wgrad 32x64x64x4x2", "packed few fallback", "e4m3 64x128x4x3")
FEW_HIP = ("packed fallback",)


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("90", FEW),
        pytest.param("90", (), marks=pytest.mark.large),
        pytest.param("80", COMMON, marks=pytest.mark.large),
        pytest.param("120", COMMON + E4M3, marks=pytest.mark.large),
    ],
)
def test_cuda_code(run_script, arch, names):
    report = run_script("run_grouped_compiler.py", "cuda", arch, *names, interpret=False)
    assert len(report) == (len(names) or 51)
    for name, asm in report.items():
        assert re.search(r"STACK:0\b.*LOCAL:0\b", asm["sass"]), name
        assert asm["shared"] <= SHARED[arch], name
        if name in ("fp32", "sum"):
            continue
        element = "e4m3|f16" if name.startswith("e4m3") else "bf16"
        assert re.search(rf"mma\.sync\S*(?:{element})|wgmma\S*(?:{element})", asm["ptx"]), name
        sides = re.search(r"(\d+)x(\d+)", name)
        if arch == "90" and sides:
            # Of packed weights the tile's second side is the tall one.
            tall = "wgrad" in name or int(sides[1 + name.startswith("packed")]) >= 64
            if name.startswith("packed"):
                tall = tall and (int(sides[1]) >= 16 or TRITON >= (3, 8)) and int(name.split("x")[2]) >= 4
            assert ("wgmma.mma_async" in asm["ptx"]) == tall, name
            assert not (tall and name.startswith("e4m3")) or "f32.e4m3.e4m3" in asm["ptx"], name
        if name not in ("odd", "packed odd"):
            # Both operands come in 16 bytes a thread, ahead of their use.
            assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", asm["ptx"]), name


@pytest.mark.parametrize(
    ("arch", "names"),
    [("gfx942", FEW_HIP), *(pytest.param(arch, COMMON, marks=pytest.mark.large) for arch in ("gfx942", "gfx950"))],
)
def test_hip_code(run_script, arch, names):
    report = run_script("run_grouped_compiler.py", "hip", arch, *names, interpret=False)
    assert len(report) == len(names)
    for name, asm in report.items():
        assert re.search(r"\.vgpr_spill_count: +0\b", asm["amdgcn"]), name
        assert re.search(r"v_mfma_f32_\w+bf16", asm["amdgcn"]), name
        assert asm["shared"] <= SHARED[arch], name
        if name in ("packed 16x64x4x3", "packed fallback"):
            assert_sums_are_there_before_the_arrival(asm["amdgcn"])


#: Weights of a thread, and instructions for each. Triton 3.8 launches no packed product with two warps.
MAIN_LOOPS = [("packed 8x128x4x3", 128, 3.4), *([("packed 16x64x2x3", 128, 3.8)] if TRITON < (3, 8) else [])]


@pytest.mark.parametrize(("name", "tile", "most"), MAIN_LOOPS)
def test_decoding_costs_few_instructions(run_script, name, tile, most):
    """Of a loop in which a thread decodes so many weights, and multiplies them from its registers."""
    asm = run_script("run_grouped_compiler.py", "cuda", "90", name, interpret=False)[name]
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);", asm["sass"])]
    loops = []
    for at, text in code:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            loops.append([line for place, line in code if int(jump[1], 16) <= place <= at])
    main = min((loop for loop in loops if any("MMA" in line for line in loop)), key=len)
    assert len(main) / tile < most
    # Two of scale bytes; the weight would take 16.
    assert "wgmma" in asm["ptx"] or sum(re.search(r"\bSTS\b", line) is not None for line in main) <= 2


@pytest.mark.parametrize(("rows", "splits"), [(1, 8), (8, 4), (64, 1)])
def test_tiles_of_few_rows_are_split_along_k(monkeypatch, rows, splits):
    """Of 16 steps, on a GPU of 132 multiprocessors."""
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: calls.append((grid, arguments))

    monkeypatch.setattr(packed, "grouped_packed_kernel", Kernel())
    for module in (packed, matmul):
        monkeypatch.setattr(module, "INTERPRETED", True)
    x = torch.empty(rows, 2048, dtype=torch.bfloat16)
    codes, scale = (torch.empty(128, 256, 2048 // n, dtype=torch.uint8) for n in (2, 32))
    offsets = torch.empty(128, dtype=torch.int32)
    assert mxfp4_kernels.grouped_matmul_packed(x, codes, scale, offsets, length=2048).shape == (rows, 256)
    (((tiles, n_splits), arguments),) = calls
    assert n_splits == splits and tiles == 8 * rows
    if splits > 1:
        sums, arrived = arguments[4]
        assert sums.shape == (splits, rows, 256) and sums.dtype == torch.float32
        assert arrived.dtype == torch.int32 and arrived.numel() >= tiles
    else:
        assert arguments[4] is None


X, W = torch.zeros(6, 8), torch.zeros(2, 4, 8)
ENDS = torch.tensor([2, 6], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([], W, ENDS), TypeError, "x must be a tensor, got list"),
        ((X.double(), W.double(), ENDS), TypeError, "x is torch.float64; use torch.bfloat16"),
        ((X, W.half(), ENDS), TypeError, "weight is torch.float16 but x is torch.float32; convert"),
        ((X, W, ENDS.long()), TypeError, "offsets must be an int32 tensor, got torch.int64; use counts.cumsum"),
        ((X, W, [2, 6]), TypeError, "got list"),
        ((X, W, ENDS[:1]), ValueError, r"of the shape \[2\], got \[1\]"),
        ((X, W, ENDS.to("meta")), ValueError, "offsets are on meta but the rows are on cpu"),
        ((X, W.to("meta"), ENDS), ValueError, "weight is on meta but x is on cpu"),
        ((X[:, :7], W, ENDS), ValueError, r"x has the shape \[6, 7\], expected \[any, 8\]"),
        ((X, W[0], ENDS), ValueError, r"weight has the shape \[4, 8\], expected \[any, any, any\]"),
        ((X, W, ENDS, torch.zeros(4)), ValueError, r"bias has the shape \[4\], expected \[2, 4\]"),
    ],
)
def test_grouped_matmul_refuses_what_does_not_fit(arguments, error, words, monkeypatch):
    from mxfp4_kernels.gemm.grouped import matmul

    monkeypatch.setattr(matmul, "INTERPRETED", True)
    with pytest.raises(error, match=words):
        mxfp4_kernels.grouped_matmul(*arguments)


def test_the_other_products_refuse_too(monkeypatch):
    from mxfp4_kernels.gemm.grouped import matmul

    with pytest.raises(ValueError, match="grouped_matmul needs tensors on a GPU"):
        mxfp4_kernels.grouped_matmul(X, W, ENDS)
    monkeypatch.setattr(matmul, "INTERPRETED", True)
    with pytest.raises(ValueError, match=r"right has the shape \[5, 8\], expected \[6, any\]"):
        mxfp4_kernels.grouped_wgrad(X, X[:5], ENDS)
    with pytest.raises(TypeError, match="results cannot be torch.float64"):
        mxfp4_kernels.grouped_wgrad(X, X, ENDS, torch.float64)
    with pytest.raises(TypeError, match="results cannot be torch.int32"):
        mxfp4_kernels.grouped_sum(X, ENDS, torch.int32)
    codes, scale = torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, 4, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scale has the shape \[2, 4, 1\]; 80 elements need \[2, 4, 3\]"):
        codes80 = torch.zeros(2, 4, 40, dtype=torch.uint8)
        mxfp4_kernels.grouped_matmul_packed(torch.zeros(6, 80), codes80, scale, ENDS, length=80)
    with pytest.raises(ValueError, match=r"x has the shape \[6, 8\], expected \[any, 9\]"):
        mxfp4_kernels.grouped_matmul_packed(X, codes, scale, ENDS, length=9)
    with pytest.raises(ValueError, match="macro is missing"):
        mxfp4_kernels.grouped_matmul_packed(X, codes, scale, ENDS, length=8, macro_block=128)


def test_tiles_are_enough_for_any_counts():
    from mxfp4_kernels.gemm.grouped.tiles import tile_slots

    generator = torch.Generator().manual_seed(0)
    for tile_rows in (16, 128):
        for experts in (1, 3, 128):
            for rows in (1, 5, 17, 300, 5000):
                counts = torch.bincount(torch.randint(experts, (rows,), generator=generator) ** 2 % experts)
                assert (-(-counts // tile_rows)).sum() <= tile_slots(rows, experts, tile_rows)


@pytest.mark.parametrize("limit", [65536, 101376, 166912, 232448])
def test_configs_fit_the_shared_memory(limit):
    from mxfp4_kernels.gemm.grouped import matmul

    for rows in (8, 16, 64, 512):
        for table, contracted in ((matmul._MATMUL, "BK"), (matmul._WGRAD, "BM")):
            for size in (2, 4):
                found = matmul.configs_within(limit, table, rows, size, contracted)
                assert found
                for config in found:
                    side = config[contracted]
                    others = config["BM"] + config["BN"] + config["BK"] - side
                    assert others * side * size * config["num_stages"] <= limit


def test_configs_are_those_that_fit_or_the_last_with_the_shortest_pipeline():
    from mxfp4_kernels.gemm.configs import fitting, fitting_packed, named

    configs = named(("BM", "BN"), [(64, 64, 4, 4), (64, 64, 4, 3), (16, 64, 4, 3)])
    assert fitting(configs, lambda config: 1000, 4000 + 4096) == configs
    assert fitting(configs, lambda config: 1000, 3999 + 4096) == configs[1:]
    assert fitting(configs, lambda config: 1000, 3999, besides=0, in_registers=1) == configs
    assert fitting(configs, lambda config: 1000, 100) == [{"BM": 16, "BN": 64, "num_warps": 4, "num_stages": 2}]
    # 128 columns of 64 or 16 rows in 16 bits, and of 64 rows in 17 bits for 4, in two stages of three.
    assert fitting_packed(configs, 2 * 20736 + 4096, 128, 2, False) == configs[1:]
    assert fitting_packed(configs, 2 * 20736 + 4095, 128, 2, False) == configs[2:]
    assert fitting_packed(configs, 2 * 12800 + 4096, 128, 2, True) == configs[2:]
