# SPDX-License-Identifier: Apache-2.0
"""Every config that a product can be launched with fits the GPU: its shared memory, and its threads' registers."""

import pytest
from compile_targets import TRITON

from mxfp4_kernels import plan_linear_w4a16
from mxfp4_kernels.gemm.decode_plan import in_registers
from mxfp4_kernels.gemm.grouped import matmul as grouped
from mxfp4_kernels.gemm.grouped import packed
from mxfp4_kernels.gemm.matmul import e4m3_tiles, mxf4_tiles, usual_configs


KERNELS = ("products", "decode", "packed", "grouped", "grouped e4m3")
#: What every run compiles: sums of groups, which leave tensor memory.
FEW = [("100", "products", ("e4m3 group 128x64x8x8x4",))]
ALL = [(arch, kernel, ()) for arch in ("90", "100", "120") for kernel in KERNELS]
ALL += [("80", kernel, ()) for kernel in KERNELS if kernel != "grouped e4m3"]
#: Bytes that a thread may spill: of the largest tiles of packed weights a dozen values, most of them for float32 input.
#: Configs are chosen by what Triton 3.7 makes of them; its neighbours spill a few values more.
SPILLED, SPILLED_PACKED = (0, 48) if TRITON[:2] == (3, 7) else (24, 96)


@pytest.mark.parametrize(
    ("arch", "kernel", "names"), [*FEW, *(pytest.param(*choice, marks=pytest.mark.large) for choice in ALL)]
)
def test_what_can_be_chosen_compiles_to_what_the_gpu_has(run_script, arch, kernel, names):
    report = run_script("run_choices_compiler.py", "cuda", arch, kernel, *names, interpret=False)
    assert len(report) == len(names) if names else len(report) > 5
    for name, found in report.items():
        assert found["shared"] <= found["limit"], (name, found)
        assert found["spilled"] <= (SPILLED_PACKED if kernel in ("decode", "packed") else SPILLED), (name, found)


@pytest.mark.parametrize(
    ("rows", "tall", "step", "warps", "options", "fits"),
    [
        (64, 64, 128, 4, {}, True),  # 64 sums, 32 pairs of weights and 64 of the other operand: 160
        (64, 128, 128, 4, {}, False),
        (64, 128, 128, 8, {}, True),
        (8, 128, 256, 4, {}, True),
        (16, 128, 256, 4, {}, False),
        (32, 64, 128, 4, {"pieces": 3}, True),
        (64, 64, 128, 4, {"pieces": 3}, False),
        (32, 64, 128, 4, {"pieces": 2}, True),
        (64, 64, 128, 4, {"pieces": 2}, False),
        (16, 32, 128, 2, {}, True),
        (16, 32, 128, 2, {"pieces": 3}, False),  # two warps hold the other operand by themselves
        (32, 32, 128, 2, {}, False),
        (64, 64, 128, 4, {"has_fallback": True}, True),
        (64, 64, 128, 4, {"has_fallback": True, "arch": "120"}, False),  # and so do four there, twice
        (32, 64, 128, 4, {"has_fallback": True, "arch": "80"}, False),
        (32, 64, 128, 4, {"arch": "80"}, True),
        (32, 64, 128, 4, {"arch": "80", "pieces": 3}, False),
        (16, 64, 128, 4, {"arch": "80", "pieces": 3}, True),
    ],
)
def test_values_that_the_threads_of_a_program_hold(rows, tall, step, warps, options, fits):
    assert in_registers({"BM": rows, "BN": tall, "num_warps": warps}, step, **options) == fits


@pytest.mark.parametrize("arch", ["80", "90", "100", "120", "gfx942", "gfx950"])
@pytest.mark.parametrize(("dtype", "pieces"), [("bfloat16", 1), ("float16", 2), ("float32", 3)])
def test_plans_have_configs_that_fit_the_registers(arch, dtype, pieces):
    for tokens in (1, 8, 9, 16, 17, 33, 64, 256):
        for options in ({}, {"macro_block": 128}, {"macro_block": 128, "outlier_fallback": 0.5}):
            configs = plan_linear_w4a16(tokens, 4096, 4096, arch, dtype=dtype, **options).configs
            rule = {"pieces": pieces, "has_fallback": "outlier_fallback" in options}
            assert configs and all(in_registers(config, config["BK"], arch, **rule) for config in configs)


def test_experts_have_configs_that_fit_the_registers():
    for rows in (8, 32, 64, 512):
        for arch, has_fallback in (("90", False), ("90", True), ("120", True)):
            found = packed.configs_within(101376, rows, has_fallback, arch)
            assert found and all(in_registers(config, 128, arch, has_fallback=has_fallback) for config in found)
    assert {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 2} not in packed.configs_within(232448, 64, True)
    largest = grouped.configs_within(232448, grouped._MATMUL, 512, 4, "BK")[0]
    assert (largest["BM"], largest["BN"], largest["num_warps"]) == (128, 128, 8)
    assert grouped.configs_within(232448, grouped._MATMUL, 512, 2, "BK")[0]["BN"] == 256


def test_two_stages_are_too_few_where_warps_hold_operands_and_totals_of_macro_blocks():
    """Those of 64 x 64 spill 232 bytes of a thread on sm_80, and are what shared memory would leave on sm_86."""
    limits = {"80": 166912, "86": 101376}
    for limit in limits.values():
        for height in (16, 64):
            found = usual_configs(height, mxf4_tiles(False, True, False, True), limit)
            assert found and all(config["num_stages"] >= 3 for config in found)
    usual = [usual_configs(64, mxf4_tiles(False, True, False, by_warps), 101376)[0] for by_warps in (False, True)]
    assert [(config["BM"], config["num_stages"]) for config in usual] == [(64, 2), (32, 3)]
    assert mxf4_tiles(False, False, False, True) == mxf4_tiles(False, True, False, False)


def test_sums_of_groups_leave_tensor_memory_for_half_of_a_tile():
    def tile(per_group: bool, tensor_memory: bool) -> tuple[int, int]:
        config = usual_configs(4096, e4m3_tiles(per_group, tensor_memory), 232448)[0]
        return config["BM"], config["BN"]

    assert tile(True, True) == (128, 64)
    assert tile(False, True) == tile(True, False) == (128, 128)
