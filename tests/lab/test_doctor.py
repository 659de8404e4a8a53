# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 doctor`: what it compares, what it says, and that it finds kernels that are wrong."""

import json
import os

import processes
import pytest
import torch
from commands import run

from hf_mxfp4.backends import self_check
from hf_mxfp4.backends import triton as kernels
from hf_mxfp4.cli import machine
from hf_mxfp4.gemm.matmul import HAS_FP8_ON_CPU
from hf_mxfp4.lab import check_kernels, doctor


KERNELS = {
    "stochastic rounding": "quantize",
    "rows and columns": "fake_quantize_rows_and_columns",
    "rotation": "fake_quantize",
    "FP8 operands": "to_fp8",
    "NVFP4 scales": "nvfp4_scales",
}


@pytest.fixture
def of_lab(monkeypatch):
    """Only what self-checks do not compare, on the CPU."""
    monkeypatch.setattr(self_check, "FAMILIES", {})
    monkeypatch.setattr(machine, "_devices", lambda facts: ["cpu"])


def test_kernels_that_write_zeros_are_found(of_lab, monkeypatch):
    def zeros(x, *arguments):
        return torch.zeros_like(x), torch.zeros_like(x), torch.zeros((), dtype=torch.int64)

    for name in KERNELS.values():
        monkeypatch.setattr(kernels, name, zeros)
    monkeypatch.setattr(kernels, "fake_quantize", lambda x, *arguments: torch.zeros_like(x, dtype=torch.float32))
    monkeypatch.setattr(
        kernels, "quantize", lambda x, scheme, *_: doctor.numerics.quantize(torch.zeros_like(x), **vars(scheme), seed=7)
    )
    found = {check.name: check.problem for check in check_kernels("cpu")}
    assert set(found) == set(KERNELS)
    assert all("differ from the eager ones" in problem for problem in found.values()), found


def test_wrong_kernels_are_named_and_the_exit_code_is_1(of_lab, monkeypatch):
    def pairs(second):
        return lambda device: iter([("sums", torch.ones(2), second)])

    monkeypatch.setattr(doctor, "_FAMILIES", {"fine": pairs(torch.ones(2)), "odd": pairs(torch.zeros(2))})
    shown, printed = run("doctor"), run("doctor", "--json")
    assert shown.exit_code == printed.exit_code == 1
    assert "AssertionError: sums differ from the eager ones" in shown.stdout and "right" in shown.stdout
    data = json.loads(printed.stdout)
    assert [check["problem"] is None for check in data["kernels"]["cpu"]] == [True, False]
    assert "torch" in data["versions"]
    monkeypatch.setattr(doctor, "_FAMILIES", {"fine": pairs(torch.ones(2))})
    assert run("doctor").exit_code == 0


@pytest.mark.skipif(not HAS_FP8_ON_CPU, reason="this PyTorch has no FP8 products on the CPU")
def test_products_on_tensor_cores_are_compared(of_lab, monkeypatch):
    monkeypatch.setattr(doctor, "_FAMILIES", {})
    monkeypatch.setattr(doctor, "hardware_of", lambda device: "sm_100")
    fp8, *fp4 = check_kernels("cpu")
    assert (fp8.name, fp8.problem) == ("FP8 products", None)
    assert [check.name for check in fp4] == ["MXFP4 products", "NVFP4 products"]
    assert all("products fail" in check.problem for check in fp4)  # which the CPU does not have
    right = doctor.multiply_fp8
    monkeypatch.setattr(doctor, "multiply_fp8", lambda *arguments: right(*arguments) + 1)
    assert "FP8 products differ" in next(check_kernels("cpu")).problem


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(machine, "_devices", lambda facts: [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = run("doctor")
    assert done.exit_code == 2 and "no GPU here. TRITON_INTERPRET=1 runs the kernels on the CPU" in done.stderr


@pytest.mark.large
def test_interpreted_kernels_are_right():
    job = processes.module("hf_mxfp4.cli", "doctor", "--json")
    done = processes.run(job, timeout=550, environment=dict(os.environ), interpret=True, no_warnings=True)
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)["kernels"]["cpu"]
    assert len(checks) == 8 and not any(check["problem"] for check in checks)
