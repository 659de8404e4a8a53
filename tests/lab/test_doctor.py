# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 doctor`: what it compares, what it says, and that it finds kernels that are wrong."""

import json
import os

import processes
import pytest
import torch
from commands import finish, run

from hf_mxfp4.cli import machine
from hf_mxfp4.lab import check_kernels, doctor
from hf_mxfp4.ops import self_check
from hf_mxfp4.ops import triton as kernels
from hf_mxfp4.ops.choice import HAS_FP8_ON_CPU


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
    monkeypatch.setattr(kernels, "fake_quantize_rows_and_columns", lambda x, *arguments: (x * 0, x.t() * 0))
    monkeypatch.setattr(kernels, "fake_quantize", lambda x, *arguments: torch.zeros_like(x, dtype=torch.float32))
    quantize = doctor.numerics.quantize
    monkeypatch.setattr(kernels, "quantize", lambda x, how, *_: quantize(torch.zeros_like(x), **vars(how), seed=7))
    found = {check.name: check.problem for check in check_kernels("cpu")}
    assert set(found) == set(KERNELS)
    assert all("differ from the eager ones" in problem for problem in found.values()), found


def compared(value):
    """A comparison of ones with ``value``."""
    return lambda device: iter([("sums", torch.ones(2), torch.full((2,), value))])


def test_wrong_kernels_are_named(of_lab, monkeypatch):
    monkeypatch.setattr(doctor, "_FAMILIES", {"fine": compared(1.0), "odd": compared(0.0)})
    shown = finish("doctor", code=1)
    assert "AssertionError: sums differ from the eager ones" in shown.stdout
    assert "right" in shown.stdout


def test_wrong_kernels_as_json(of_lab, monkeypatch):
    monkeypatch.setattr(doctor, "_FAMILIES", {"fine": compared(1.0), "odd": compared(0.0)})
    facts = json.loads(finish("doctor", "--json", code=1).stdout)
    assert [check["problem"] is None for check in facts["kernels"]["cpu"]] == [True, False]
    assert "torch" in facts["versions"]


def test_right_kernels(of_lab, monkeypatch):
    monkeypatch.setattr(doctor, "_FAMILIES", {"fine": compared(1.0)})
    finish("doctor")


@pytest.mark.skipif(not HAS_FP8_ON_CPU, reason="this PyTorch has no FP8 products on the CPU")
def test_products_on_tensor_cores_are_compared(of_lab, monkeypatch):
    monkeypatch.setattr(doctor, "_FAMILIES", {})
    monkeypatch.setattr(doctor, "hardware_of", lambda device: "sm_100")
    fp8, *fp4 = check_kernels("cpu")
    assert (fp8.name, fp8.problem) == ("FP8 products", None)
    assert [check.name for check in fp4] == ["MXFP4 products", "MXFP8 products", "NVFP4 products"]
    assert all("products fail" in check.problem for check in fp4)  # which the CPU does not have
    right = doctor.multiply_fp8
    monkeypatch.setattr(doctor, "multiply_fp8", lambda *arguments: right(*arguments) + 1)
    assert "FP8 products differ" in next(check_kernels("cpu")).problem


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(machine, "_devices", lambda facts: [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = run("doctor")
    assert done.exit_code == 2
    assert "no GPU here. TRITON_INTERPRET=1 runs the kernels on the CPU" in done.stderr


@pytest.mark.large
def test_interpreted_kernels_are_right():
    job = processes.module("hf_mxfp4.cli", "doctor", "--json")
    done = processes.run(job, timeout=550, environment=dict(os.environ), interpret=True, no_warnings=True)
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)["kernels"]["cpu"]
    assert len(checks) == 9
    assert not any(check["problem"] for check in checks)
