# SPDX-License-Identifier: Apache-2.0
"""Self-checks of kernels find what is broken, once, and what they find bad is not used."""

import pytest
import torch

from hf_mxfp4.backends import self_check
from hf_mxfp4.backends.self_check import FAMILIES, verdicts
from hf_mxfp4.backends.self_check.verdicts import Family


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("what", "faults"), [("few", 10), pytest.param("all", 29, marks=pytest.mark.large)])
def test_checks_pass_and_find_each_broken_kernel(run_script, what, faults):
    report = run_script("run_self_checks.py", what, interpret=True)
    assert report["as they are"] == dict.fromkeys(FAMILIES)
    assert len(report["broken"]) == faults
    for name, found in report["broken"].items():
        assert found is not None and ("off by" in found or "not the definition's" in found), name


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU that does not exist, and nothing known about it."""
    capturing = []
    monkeypatch.setattr(verdicts, "_is_captured", lambda device: bool(capturing))
    monkeypatch.setattr(verdicts, "_found", {})
    monkeypatch.delenv("HF_MXFP4_SELF_CHECK", raising=False)
    return capturing


def family(found: object, name: str = "sums") -> tuple[Family, list]:
    """A family whose check finds this, or raises it, and the devices that it was asked about."""
    asked = []

    def check(device: torch.device) -> str | None:
        asked.append(device)
        if isinstance(found, Exception):
            raise found
        return found

    return Family(name, check, "ordinary sums"), asked


def test_what_passes_is_checked_once_in_a_process(one_gpu):
    sums, asked = family(None)
    assert verdicts.state(sums, GPU) == "not checked yet"
    assert verdicts.problem(sums, GPU) is verdicts.problem(sums, GPU) is None
    assert verdicts.state(sums, GPU) == "checked" and asked == [GPU]


@pytest.mark.parametrize(
    ("found", "words"), [("is off by 1", "is off by 1"), (RuntimeError("no memory"), "RuntimeError: no memory")]
)
def test_what_fails_is_reported_once(one_gpu, found, words, caplog):
    sums, asked = family(found)
    with pytest.warns(UserWarning, match=f"the sums kernels do not work on cuda:0: {words}.*ordinary sums"):
        assert verdicts.problem(sums, GPU) == words
    assert verdicts.problem(sums, GPU) == words  # and no second warning, which would be an error
    assert asked == [GPU] and [entry.levelname for entry in caplog.records] == ["ERROR"]
    assert verdicts.state(sums, GPU) == f"failed: {words}; ordinary sums in their place"


def test_nothing_is_checked_under_capture_or_while_code_is_traced(one_gpu, monkeypatch):
    sums, asked = family(None)
    one_gpu.append(True)
    with pytest.warns(UserWarning, match="sums kernels: a CUDA graph is captured.*run the model once before"):
        assert "is captured" in verdicts.problem(sums, GPU)
    one_gpu.clear()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "is traced" in verdicts.problem(sums, GPU)
    assert asked == []
    monkeypatch.undo()
    monkeypatch.setattr(verdicts, "_found", {})
    monkeypatch.setattr(verdicts, "_is_captured", lambda device: False)
    assert verdicts.problem(sums, GPU) is None and asked == [GPU]


def test_the_environment_switches_checks_off(one_gpu, monkeypatch):
    sums, asked = family("is off by 1")
    monkeypatch.setenv("HF_MXFP4_SELF_CHECK", "0")
    assert verdicts.problem(sums, GPU) is None and asked == []
    assert verdicts.state(sums, GPU) == "not checked (HF_MXFP4_SELF_CHECK=0)"


def test_checks_begin_without_the_modes_of_who_asks(one_gpu):
    def check(device: torch.device) -> str | None:
        made = torch.ones(1, device="cpu") @ torch.ones(1, device="cpu")
        return f"{made.dtype} {made.is_inference()} {torch.ones(1).device} {torch.is_grad_enabled()}"

    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        with pytest.warns(UserWarning, match="torch.float32 False cpu False"):
            verdicts.problem(Family("modes", check, "nothing"), GPU)


def test_hardware_without_the_instructions_needs_no_check(one_gpu, monkeypatch):
    asked = []
    for name in ("has_fp8", "has_mxfp4", "has_e2m1"):
        monkeypatch.setattr(f"mxfp4_kernels.{name}", lambda device, name=name: name == "has_fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    for name, known in FAMILIES.items():
        changed = Family(name, lambda device, name=name: asked.append(name), known.instead, known.needs, known.exists)
        monkeypatch.setitem(FAMILIES, name, changed)
    found = self_check.check_all(GPU)
    absent = "mxfp4 products", "fp8 products of torch", "codes by instruction"
    assert asked == [name for name in FAMILIES if name not in absent]
    assert found.pop("codes by instruction") == "not checked (no instruction for E2M1 here)"
    assert found.pop("mxfp4 products") == "not checked (no MXFP4 tensor cores here)"
    assert found.pop("fp8 products of torch").startswith("not checked (no product of FP8 with scales of 128")
    assert set(found.values()) == {"checked"} and list(found) == asked
