# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark on the CPU: what is wrong, missing or late is recorded so, and the table of its records."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import processes
import pytest
import torch

from benchmarks import records
from benchmarks.documents import gpu as tables
from benchmarks.gpu import bench as bench_module
from benchmarks.gpu import cases, item, timed
from benchmarks.gpu.bench import INTERPRETER, Bench, Case, graph_samples, interleaved, kernel_table, kernels_of
from benchmarks.gpu.timed import RECORDS, SECONDS


CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path):
    made = Bench(CPU, True, tmp_path, {"hardware": INTERPRETER, "commit": "abc"})
    made.ceilings.update(copy=1e9, bf16=1e10)
    return made


def case(ours=1.0, eager=1.0, peers=(), **options):
    """A case whose call returns a number on each backend."""
    numbers = {"triton": ours, "eager": eager}
    return Case(
        "some", "one", (2, 3), lambda _, name: lambda: torch.tensor([numbers[name]]), peers=dict(peers), **options
    )


def recorded(folder):
    return json.loads((folder / RECORDS).read_text())


def test_a_right_case_is_recorded_beside_its_peers(bench, monkeypatch):
    bench.rounds = 3
    # Ours and BF16 in turns.
    seconds = iter([2.0, 5.0, 1.0, 4.0, 4.0, 8.0])
    monkeypatch.setattr("benchmarks.gpu.bench.SAMPLES", {"gpu": lambda *_, **__: next(seconds)})

    def absent(_):
        raise ImportError("no bitsandbytes")

    peers = {"BF16": lambda _: lambda: None, "NF4": absent}
    bench.run(case(n_bytes=1e9, flops={"bf16": 5e9}, peers=peers))
    (record,) = recorded(bench.out)
    assert (record["name"], record["shape"], record["status"]) == ("some / one", [2, 3], "ok")
    assert record["samples"] == {"ours": [2.0, 1.0, 4.0], "BF16": [5.0, 4.0, 8.0]}
    assert (record["seconds"], record["peers"]["BF16"]["seconds"]) == (2.0, 5.0)
    assert (record["baseline"], record["ratio"], record["value"]) == ("BF16", 2.5, 5e9 / 1e12 / 2)
    assert record["ceiling_fraction"] == 0.5
    assert "no bitsandbytes" in record["peers"]["NF4"]["reason"]
    assert record["tiny"]
    assert (record["hardware"], record["commit"]) == (INTERPRETER, "abc")


def test_samples_are_taken_in_turns():
    order = []
    taken = interleaved({name: partial(_append, order, name) for name in "ab"}, 2)
    assert order == ["a", "b", "a", "b"]
    assert taken == {"a": [1, 3], "b": [2, 4]}


def _append(order, name):
    order.append(name)
    return len(order)


def test_the_time_of_emptying_the_cache_is_taken_off(monkeypatch):
    seconds = {"flush": 1.0, "ours": 3.0, "BF16": 6.0}
    monkeypatch.setattr(bench_module, "flush", lambda device: None)
    monkeypatch.setattr(bench_module, "graph_of", lambda calls, device: "flush")
    monkeypatch.setattr(bench_module, "gpu_seconds", lambda graph, device: seconds[graph])
    # Of ten calls in a graph.
    assert graph_samples({"ours": "ours", "BF16": "BF16"}, CPU, 2) == {"ours": [0.2, 0.2], "BF16": [0.5, 0.5]}


def test_kernels_are_counted_by_name():
    a = torch.ones(2, 2)
    found = kernels_of(lambda: (a @ a) @ a, CPU)
    count, seconds = found["aten::mm"]
    assert count == 2
    assert seconds > 0


def test_a_table_of_kernels_has_the_longest_first():
    table = kernel_table({"short": (2, 1.0), "long": (1, 3.0)})
    assert (table["launches"], table["gpu_seconds"]) == (3, 4.0)
    assert [kernel["name"] for kernel in table["kernels"]] == ["long", "short"]


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
    first, second = recorded(bench.out)
    assert first["status"] == status
    assert reason in first["reason"]
    assert "Traceback" in first["traceback"]
    assert second["status"] == "ok"
    assert reason in capsys.readouterr().out


def test_what_no_longer_fits_into_the_time_is_skipped(tmp_path):
    bench = Bench(CPU, True, tmp_path, {}, seconds=0.0)
    bench.run(case())
    assert [(r["status"], r["reason"]) for r in recorded(tmp_path)] == [("skipped", "no time left")]


def test_a_later_process_adds_to_the_records_and_knows_the_ceilings(tmp_path):
    Bench(CPU, True, tmp_path, {}).measure_ceilings()
    later = Bench(CPU, True, tmp_path, {})
    assert set(later.ceilings) == {"copy", "bf16", "fp8"}
    later.run(case())
    assert [record["name"] for record in recorded(tmp_path)][-1] == "some / one"
    assert len(recorded(tmp_path)) == 4


def test_the_backward_pass_of_experts_comes_first_and_is_compared_with_the_cpu():
    """Of all that is measured, it alone runs the products of CUDA that assert how their operands lie in memory."""
    first = next(cases.experts(tiny=False))
    assert next(iter(SECONDS)) == "experts"
    assert first.name == "experts / w4a8"
    assert first.expected_on_cpu


def test_every_item_has_a_time_and_what_it_runs():
    assert {*item.CASES, *item.RUNS} == set(SECONDS)


def test_every_item_is_documented():
    text = (records.ROOT / "docs" / "performance.md").read_text()
    assert all(f"`{name}`" in text for name in SECONDS)


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for interpret, message in (("0", "TRITON_INTERPRET=1"), ("1", "add --tiny")):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert timed.main(["--out", str(tmp_path / "out"), "--only", "host"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_records_of_another_run_are_not_mixed_with_new_ones(tmp_path, capsys):
    put(tmp_path, "gpu_timed")
    with pytest.raises(SystemExit):
        timed.main(["--out", str(tmp_path)])
    assert "choose another folder" in capsys.readouterr().err


class Process:
    """Stands for the process of an item, and writes down its time."""

    reasons: dict = {}
    seconds: list = []

    def __init__(self, name, options, started):
        self.name = name

    def measure(self, seconds, command):
        self.seconds.append((self.name, round(seconds)))
        return self.reasons.get(self.name)


@pytest.fixture
def stubbed_processes(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(timed, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setattr(timed, "Item", Process)
    monkeypatch.setattr(Process, "seconds", [])
    return Process


def test_each_item_gets_its_share_of_the_time_that_is_left(tmp_path, stubbed_processes, monkeypatch):
    monkeypatch.setattr(bench_module, "find_device", lambda tiny: CPU)
    arguments = ["--out", str(tmp_path), "--deadline", "50", "--only", "products", "host", "training"]
    timed.main(arguments)
    # 15 : 60 : 90; the clock stands still, so that each finds all of the time left.
    assert stubbed_processes.seconds == [("host", 5), ("training", 20), ("products", 50)]


def test_an_item_that_breaks_off_is_recorded_and_the_rest_goes_on(tmp_path, stubbed_processes, monkeypatch):
    monkeypatch.setattr(Process, "reasons", {"host": "stopped after 5 s"})
    assert timed.main(["--tiny", "--out", str(tmp_path), "--only", "host", "training"]) == 1
    assert [name for name, _ in stubbed_processes.seconds] == ["host", "training"]
    (record,) = recorded(tmp_path)
    assert (record["name"], record["status"]) == ("host / whole item", "failed")
    assert record["reason"] == "RuntimeError: stopped after 5 s"


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("import sys; sys.stdin.read(); sys.exit(3)", 30.0, "its process ended with exit code 3"),
        ("import sys, time; sys.stdin.close(); time.sleep(60)", 1.0, "stopped after 1 s"),
        ("import sys, json; assert json.load(sys.stdin)['seconds'] == 24", 30.0, None),
    ],
)
def test_a_process_that_fails_or_hangs_is_named(monkeypatch, tmp_path, code, seconds, reason):
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: popen([sys.executable, "-c", code], **how))
    options = timed.parser().parse_args(["--out", str(tmp_path)])
    with contextlib.ExitStack() as started:
        assert timed.Item("host", options, started).measure(seconds, "command") == reason


def test_a_command_that_ends_ends_its_processes(monkeypatch, tmp_path):
    popen = subprocess.Popen
    found = []

    def spawned(words, **how):
        found.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **how))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", spawned)
    with contextlib.ExitStack() as started:
        timed.Item("host", timed.parser().parse_args(["--out", str(tmp_path)]), started)
    assert [process.returncode for process in found] == [-signal.SIGKILL]


#: Compiles the kernel of a product twice, and launches it once on real tensors up to the driver; prints its names.
COMPILED = """
import contextlib, torch, triton
from benchmarks import host_time
from benchmarks.gpu.precompile import compiled
from benchmarks.host_time import packed_layer, planned_for_gpu, stubbed_launches
from mxfp4_kernels.decode import product
host_time.without_machine_code = contextlib.nullcontext
hits, names = [], []
triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
compiled("90", (1536, 1536, 1, True))
product.decode_kernel.device_caches.clear()
names.append(compiled("90", (1536, 1536, 1, True)))
layer = packed_layer(1536)
with stubbed_launches(), torch.no_grad():
    x = torch.zeros(1, 1536).bfloat16()
    planned_for_gpu(layer, x)
    product.decode_kernel.device_caches.clear()
    layer(x)
    (kernels, *_), = product.decode_kernel.device_caches.values()
    names += [kernel.hash for kernel in kernels.values()]
print(hits, names[0] == names[1])
"""


def test_kernels_compiled_without_a_gpu_are_those_that_layers_launch(tmp_path):
    job = processes.code(COMPILED)
    done = processes.run(job, environment=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert done.stdout.splitlines()[-1] == "[False, True, True] True"
    assert len(list(tmp_path.glob("*/decode_kernel.cubin"))) == 1


@pytest.mark.parametrize("items", [("decode",), pytest.param(tuple(SECONDS), marks=pytest.mark.large)])
def test_items_run_in_the_interpreter(tmp_path, items):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    job = processes.module(
        "benchmarks.gpu.timed", "--tiny", "--deadline", "3000", "--out", tmp_path / "out", "--only", *items
    )
    done = processes.run(job, interpret=True, environment=environment, timeout=900)
    assert done.returncode == 0, done.output
    found = recorded(tmp_path / "out")
    assert {record["hardware"] for record in found} == {INTERPRETER}
    measured_sections = {record["name"].split(" / ")[0] for record in found if record["status"] == "ok"}
    sections = {"training": {"ceilings", "linear"}, "schemes": {"quantize", "to_e4m3", "forward", "linear"}}
    assert measured_sections == set().union(*(sections.get(name, {name}) for name in items))
    assert all(record["reason"] for record in found if record["status"] == "skipped")
    with pytest.raises(ValueError, match="no number to publish"):
        tables.gpu(tmp_path / "out")


# ---- documents ------------------------------------------------------------------------------------------------------


def measured(**changed):
    return {
        "name": "decode / 1 rows", "shape": [4096, 4096], "status": "ok", "value": 3000.0, "unit": "GB/s",
        "baseline": "BF16", "ratio": 3.2, "ceiling_fraction": 0.7, "hardware": "NVIDIA H200", "tiny": False,
        "command": "python -m benchmarks.gpu.timed --out x", "commit": "abc", "date": "2026-11-21", "versions": {},
        "peers": {"BF16": {"ratio": 3.2}, "NF4": {"reason": "not installed"}}, **changed,
    }  # fmt: skip


def put(folder, name, *found):
    (folder / f"{name}.json").write_text(json.dumps(found))


def test_a_table_of_what_was_measured(tmp_path):
    put(tmp_path, "gpu_decode", measured(), measured(name="decode / 4 rows", status="skipped", reason="no time left"))
    text = tables.gpu(tmp_path)
    assert "| 1 rows | 4096x4096 | 3000 GB/s | 70 % | 3.20x |" in text
    assert "On NVIDIA H200; commit abc, 2026-11-21" in text
    assert "Not measured: decode / 4 rows 4096x4096: no time left" in text


@pytest.mark.parametrize("changed", [{"hardware": INTERPRETER}, {"tiny": True}])
def test_interpreted_and_tiny_runs_are_never_published(tmp_path, changed):
    put(tmp_path, "gpu_decode", measured(**changed))
    with pytest.raises(ValueError, match="no number to publish"):
        tables.gpu(tmp_path)
