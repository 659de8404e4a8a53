# SPDX-License-Identifier: Apache-2.0
"""The model of GPUs that are not there: how it reads machine code, and what it makes of kernels that it compiles."""

import json
import os

import processes
import pytest
import torch

from benchmarks.gpu.cases import cases
from benchmarks.gpu.model.code import (
    Compiled,
    Loop,
    body,
    counted,
    loops_of,
    read_sass,
    resources,
    weights_of,
)
from benchmarks.gpu.model.estimate import estimate, estimate_operator, executed, in_turn
from benchmarks.gpu.model.gpus import ARCHS, gpus_of
from benchmarks.gpu.model.stub import Operator
from benchmarks.gpu.model.work import Work


H100, H200 = gpus_of("sm_90")

#: A loop of ten instructions at 0x0020, skipped by the branch at 0x0010; behind it another that the branch at 0x00d0
#: skips, an exit for some threads, one for all, and what is called.
SASS = """
  Function kernel:
  REG:40 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:640 TEXTURE:0 SURFACE:0 SAMPLER:0
        /*0000*/                   MOV R1, c[0x0][0x28] ;            /* 0x0 */
        /*0010*/              @!P0 BRA 0xc0 ;                         /* 0x0 */
        /*0020*/                   LDG.E.128 R4, [R2.64] ;            /* 0x0 */
        /*0030*/                   LOP3.LUT R0, R0, 0x7, RZ, 0xc0, !PT ;
        /*0040*/                   FFMA R5, R4, R4, R5 ;
        /*0050*/                   IMAD.MOV.U32 R6, RZ, RZ, R5 ;
        /*0060*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0070*/                   MUFU.RCP R7, R5 ;
        /*0080*/                   STS [R9], R7 ;
        /*0090*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/               @P1 BRA 0x20 ;
        /*00c0*/                   ISETP.GE.AND P2, PT, R0, 0x80, PT ;
        /*00d0*/               @P2 BRA 0x1a0 ;
        /*00e0*/                   MOV R3, R4 ;
        /*00f0*/                   FADD R3, R3, R4 ;
        /*0100*/                   FADD R3, R3, R4 ;
        /*0110*/                   FADD R3, R3, R4 ;
        /*0120*/                   FADD R3, R3, R4 ;
        /*0130*/                   FADD R3, R3, R4 ;
        /*0140*/                   FADD R3, R3, R4 ;
        /*0150*/                   FADD R3, R3, R4 ;
        /*0160*/                   FADD R3, R3, R4 ;
        /*0170*/                   FADD R3, R3, R4 ;
        /*0180*/               @P3 BRA 0xf0 ;
        /*0190*/                   FMUL R3, R3, R4 ;
        /*01a0*/               @P4 EXIT ;
        /*01b0*/                   STG.E [R2.64], R3 ;
        /*01c0*/                   EXIT ;
        /*01d0*/                   MUFU.RSQ R3, R3 ;
        /*01e0*/                   RET.REL.NODEC R2 0x0 ;
        /*01f0*/                   BRA 0x1f0;
        /*0200*/                   NOP;
"""


def numbers(code: str, *trips: float, finishing: float = 1.0) -> dict[str, float]:
    lines = body(read_sass(code))
    return counted(lines, weights_of(lines, trips, finishing))


def test_machine_code_is_read():
    code = read_sass(SASS)
    assert [one.name for one in code[:4]] == ["MOV", "BRA", "LDG.E.128", "LOP3.LUT"]
    assert (code[1].target, code[1].conditional, code[0].target) == (0xC0, True, None)
    assert body(code)[-1].at == 0x1C0 and all(one.name != "NOP" for one in code)
    assert loops_of(body(code)) == [Loop(0x20, 0xB0), Loop(0xF0, 0x180)]
    assert resources(SASS) == (40, 24)


def test_loops_count_as_often_as_they_run():
    once, often = numbers(SASS, 1, 1), numbers(SASS, 7, 1)
    in_loop = {"loads": 2, "integer": 1, "float": 1, "multiply": 1, "matrix": 1, "special": 1, "scalar": 1, "other": 2}
    assert {pipe: often[pipe] - once[pipe] for pipe in in_loop} == {pipe: 6 * n for pipe, n in in_loop.items()}
    # MOV and ISETP before, MOV of the second part; its loop and FMUL.
    assert once["integer"] == 1 + 3 and once["float"] == 1 + 10


def test_a_loop_that_does_not_run_takes_what_its_branch_skips():
    found = numbers(SASS, 7)
    assert found["float"] == 7 and found["integer"] == 7 + 2


def test_a_kernel_that_streams_is_bound_by_memory():
    code = "/*0010*/ LDG.E.128 R4, [R2.64] ; /*0020*/ STG.E.128 [R2.64], R4 ; /*0030*/ EXIT ;"
    n_bytes = 2 * 16 * 128 * 65536
    found = estimate(Compiled(code, 16, 0, 0, 4), H100, Work(n_bytes, 65536 * 128 * 16, "byte", 65536))
    assert found.bottleneck == "memory"
    assert found.seconds == pytest.approx(2e-6 + n_bytes / (0.9 * 3.35e12))
    assert found.instructions["loads"] == pytest.approx(2 / 16)


def test_a_kernel_of_integers_is_bound_by_their_pipe():
    lines = [f"/*{16 * at:04x}*/ LOP3.LUT R0, R0, R0, RZ, 0x3c, !PT ;" for at in range(1000)]
    code = "\n".join([*lines, "/*4000*/ EXIT ;"])
    found = estimate(Compiled(code, 16, 0, 0, 4), H100, Work(1.0, 1.0, "unit", 132 * 100))
    # 4 warps for 4 schedulers, two cycles each at 80 % of 1.7 GHz.
    assert found.bottleneck == "integer"
    assert found.seconds == pytest.approx(2e-6 + 100 * 1000 * 2 / (0.8 * 1.7e9))
    assert found.parts["issue"] == pytest.approx(100 * 1001 / (0.7 * 1.7e9))


def test_loops_of_a_kernel_without_a_rule_are_refused():
    with pytest.raises(ValueError, match="needs a rule in benchmarks/gpu/model/work.py"):
        executed(Compiled(SASS, 16, 0, 0, 4), Work(1.0, 1.0, "unit", 1, has_rule=False))


def test_products_of_the_library():
    sizes, flops = ((8192, 4096), (4096, 4096)), 2 * 8192 * 4096 * 4096
    n_bytes = 2 * (8192 * 4096 * 2 + 4096 * 4096)
    found = estimate_operator(Operator("mm", tuple((size, torch.bfloat16) for size in sizes), n_bytes), H100)
    assert found.seconds == pytest.approx(2e-6 + flops / (0.8 * 989e12)) and found.bottleneck == "tensor"
    inputs = tuple((size, torch.float8_e4m3fn) for size in sizes)
    eight = estimate_operator(Operator("_scaled_mm_v2", inputs, n_bytes), H100)
    assert eight.seconds == pytest.approx(2e-6 + flops / (1.5 * 0.8 * 989e12))
    clone = estimate_operator(Operator("clone", inputs, n_bytes), H200)
    assert clone.seconds == pytest.approx(2e-6 + n_bytes / (0.9 * 4.8e12))
    assert in_turn([found, clone]).seconds == pytest.approx(found.seconds + clone.seconds)


# ---- what is compiled -----------------------------------------------------------------------------------------------


def run_model(request, *command, interpret=False):
    environment = os.environ | {"TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton"))}
    job = processes.module("benchmarks.gpu.model", *command)
    return processes.run(job, environment=environment, interpret=interpret, timeout=900)


@pytest.mark.parametrize("arch", [ARCHS[0], *(pytest.param(arch, marks=pytest.mark.large) for arch in ARCHS[1:])])
def test_the_command(request, tmp_path, arch):
    out = tmp_path / "modelled.json"
    others = {"gpu": gpus_of(arch)[0].name, "name": "decode / x", "shape": [1]}
    out.write_text(json.dumps([others]))
    for _ in range(2):
        done = run_model(request, "--arch", arch, "--only", "to_e4m3", "--kernels", "--out", out)
        assert done.returncode == 0, done.output
    # Records of the same cases are replaced, others stay.
    kept, *found = json.loads(out.read_text())
    assert kept == others and len(found) == len(gpus_of(arch))
    for record in found:
        assert record["kind"] == "modelled" and record["hardware"] == "none: modelled from compiled code"
        kernel = max(record["kernels"], key=lambda kernel: kernel["seconds"])
        assert (record["arch"], kernel["spilled"]) == (arch, 0) and 5 < kernel["instructions"] < 50
        assert f"{record['value']:.1f} us" in done.stdout and kernel["name"] in done.stdout


@pytest.mark.large
@pytest.mark.parametrize("arch", ARCHS)
def test_every_case_is_modelled_on_every_architecture(request, tmp_path, arch):
    done = run_model(request, "--arch", arch, "--out", tmp_path / "modelled.json")
    assert done.returncode == 0, done.output
    found = json.loads((tmp_path / "modelled.json").read_text())
    assert len(found) == len(cases()) * len(gpus_of(arch))
    # Products in FP8 and FP4 are counted against the ceiling in BF16, of which those of FP4 are four times.
    most = {record["name"]: 4 if record["name"].startswith(("linear", "forward")) else 1 for record in found}
    assert all(0 < record["ceiling_fraction"] <= most[record["name"]] for record in found)


@pytest.mark.parametrize(
    ("command", "interpret", "message"),
    [
        (["--arch", "sm_91"], False, "sm_91: not known; choose from sm_90, sm_100, sm_120"),
        (["--only", "generate"], False, "no such section is modelled: generate"),
        ([], True, "TRITON_INTERPRET=1 is set"),
    ],
)
def test_commands_that_cannot_work(request, command, interpret, message):
    done = run_model(request, *command, interpret=interpret)
    assert done.returncode == 2 and message in done.stderr
