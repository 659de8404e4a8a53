# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark on the CPU: what is wrong, missing or late is recorded so, and the table of its records."""

import json
import os

import processes
import pytest
import torch

from benchmarks import records
from benchmarks.documents import gpu as tables
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.bench import INTERPRETER, Bench, Case
from benchmarks.gpu.cases import cases


CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path):
    made = Bench(CPU, True, tmp_path, "command")
    made.ceilings.update(copy=1e9, bf16=1e10)
    return made


def case(ours=1.0, eager=1.0, peers=(), **options):
    """A case whose call returns a number on each backend."""
    numbers = {"triton": ours, "eager": eager}
    return Case(
        "some", "one", (2, 3), lambda _, name: lambda: torch.tensor([numbers[name]]), peers=dict(peers), **options
    )


def recorded(bench):
    return json.loads((bench.out / "gpu_some.json").read_text())


def test_a_right_case_is_recorded_beside_its_peers(bench, monkeypatch):
    seconds = iter([2.0, 5.0])
    monkeypatch.setattr("benchmarks.gpu.bench.seconds_of", lambda *_: next(seconds))

    def absent(_):
        raise ImportError("no bitsandbytes")

    peers = {"BF16": lambda _: lambda: None, "NF4": absent}
    bench.run(case(n_bytes=1e9, flops={"bf16": 5e9}, peers=peers))
    (record,) = recorded(bench)
    assert (record["name"], record["shape"], record["status"]) == ("some / one", [2, 3], "ok")
    assert (record["baseline"], record["ratio"], record["value"]) == ("BF16", 2.5, 5e9 / 1e12 / 2)
    assert record["ceiling_fraction"] == 0.5
    assert "no bitsandbytes" in record["peers"]["NF4"]["reason"]
    assert record["tiny"]
    assert record["hardware"] == INTERPRETER
    assert record["command"] == "command"


@pytest.mark.parametrize(
    ("made", "status", "reason"),
    [
        (case(ours=1.1, tolerance=1e-2), "failed", "WrongResult: some / one: relative error 1.00e-01, at most 1e-02"),
        (case(ours=float("nan"), tolerance=1e-2), "failed", "relative error nan"),
        (Case("some", "one", (1,), lambda *_: 1 / 0), "failed", "ZeroDivisionError"),
    ],
)
def test_what_is_wrong_or_raises_is_recorded_and_the_rest_goes_on(bench, capsys, made, status, reason):
    bench.run(made)
    bench.run(case())
    first, second = recorded(bench)
    assert first["status"] == status
    assert reason in first["reason"]
    assert "Traceback" in first["traceback"]
    assert second["status"] == "ok"
    assert reason in capsys.readouterr().out


def test_what_no_longer_fits_into_the_time_is_skipped(tmp_path):
    bench = Bench(CPU, True, tmp_path, "command", seconds=0.0)
    bench.run(case())
    assert [(r["status"], r["reason"]) for r in recorded(bench)] == [("skipped", "no time left")]


def test_the_backward_pass_of_experts_comes_first():
    """Of all that is measured, it alone runs the products of CUDA that assert how their operands lie in memory."""
    assert cases()[0].name == "linear / experts, w4a8"


def test_every_section_is_documented():
    text = (records.ROOT / "docs" / "performance.md").read_text()
    assert all(f"`{name}`" in text for name in command.SECTIONS)
    assert {case.section for case in cases()} | {"generate", "grpo_step"} == set(command.SECTIONS)


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for interpret, message in (("0", "TRITON_INTERPRET=1"), ("1", "add --tiny")):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert command.main(["--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sections", [("to_e4m3",), pytest.param(command.SECTIONS, marks=pytest.mark.large)])
def test_sections_run_in_the_interpreter(tmp_path, sections):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    job = processes.module("benchmarks.gpu", "--tiny", "--out", tmp_path, "--only", *sections)
    done = processes.run(job, interpret=True, environment=environment, timeout=900)
    assert done.returncode == 0, done.output
    for section in ("ceilings", *sections):
        found = json.loads((tmp_path / f"gpu_{section}.json").read_text())
        assert any(record["status"] == "ok" for record in found)
        assert {r["hardware"] for r in found} == {INTERPRETER}
    assert " 0 failed" in done.stdout
    with pytest.raises(ValueError, match="no number to publish"):
        tables.gpu(tmp_path)


# ---- documents ------------------------------------------------------------------------------------------------------


def measured(**changed):
    return {
        "name": "decode / 1 rows", "shape": [4096, 4096], "status": "ok", "value": 3000.0, "unit": "GB/s",
        "baseline": "BF16", "ratio": 3.2, "ceiling_fraction": 0.7, "hardware": "NVIDIA H200", "tiny": False,
        "command": "python -m benchmarks.gpu --out x", "date": "2026-11-21", "versions": {},
        "peers": {"BF16": {"ratio": 3.2}, "NF4": {"reason": "not installed"}}, **changed,
    }  # fmt: skip


def put(folder, name, *found):
    (folder / f"{name}.json").write_text(json.dumps(found))


def test_a_table_of_what_was_measured(tmp_path):
    put(tmp_path, "gpu_decode", measured(), measured(name="decode / 4 rows", status="skipped", reason="no time left"))
    text = tables.gpu(tmp_path)
    assert "| 1 rows | 4096x4096 | 3000 GB/s | 70 % | 3.20x |" in text
    assert "NVIDIA H200" in text
    assert "Not measured: decode / 4 rows 4096x4096: no time left" in text


def test_modelled_numbers_are_in_no_table(tmp_path):
    put(tmp_path, "gpu_modelled", measured(kind="modelled", name="decode / 2 rows"))
    put(tmp_path, "gpu_decode", measured())
    text = tables.gpu(tmp_path)
    assert "1 rows" in text
    assert "2 rows" not in text


@pytest.mark.parametrize("changed", [{"hardware": INTERPRETER}, {"tiny": True}])
def test_interpreted_and_tiny_runs_are_never_published(tmp_path, changed):
    put(tmp_path, "gpu_decode", measured(**changed))
    with pytest.raises(ValueError, match="no number to publish"):
        tables.gpu(tmp_path)
