# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark's own machinery, on the CPU: nothing wrong, missing or late goes unnoticed."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.documents import gpu_tables
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import shapes
from benchmarks.gpu.bench import Absent, Aim, Bench, Measured, Work
from benchmarks.gpu.checks import WrongResult, expect_close, expect_equal, some_rows
from benchmarks.gpu.machine import INTERPRETER, Machine
from benchmarks.gpu.report import WIDTH, report, row
from benchmarks.gpu.sections import quantize_pack
from benchmarks.gpu.timing import Timing, compare
from hf_mxfp4 import numerics


REQUIRED = set("name shape value unit baseline ratio ceiling_fraction hardware versions command date".split())


@pytest.fixture
def bench(tmp_path):
    made = Bench(Machine(torch.device("cpu"), interpreted=True, tiny=True), tmp_path, "command")
    made.ceilings.update(copy=1e9, bf16=1e10, fp8=2e10)
    return made


def run(bench, section, seconds=60.0):
    bench.section("some", section, seconds)
    return json.loads((bench.out / "gpu_some.json").read_text())


def fine():
    return Measured(1.0, "GB/s")


def test_a_case_that_raises_is_recorded_and_the_rest_goes_on(bench):
    def wrong():
        raise WrongResult("codes: 3 of 8 bytes differ")

    def section(bench):
        bench.case("first", [1], wrong)
        bench.case("second", [2], fine)

    first, second = run(bench, section)
    assert first["status"] == "failed" and "3 of 8" in first["reason"] and "Traceback" in first["traceback"]
    assert second["status"] == "ok" and len(bench.failed) == 1
    assert REQUIRED <= first.keys() and REQUIRED <= second.keys()
    text = report(bench, 1.0)
    assert "WrongResult: codes: 3 of 8 bytes differ" in text and "1 measured, 0 skipped, 1 failed" in text


def test_a_section_that_raises_is_one_failure(bench):
    def section(bench):
        bench.case("first", [1], fine)
        raise ImportError("no such kernel")

    assert [r["status"] for r in run(bench, section)] == ["ok", "failed"]


@pytest.mark.parametrize("seconds", [0.0, 2.05])
def test_what_no_longer_fits_is_listed(bench, seconds):
    def slow():
        import time

        time.sleep(0.1)
        return fine()

    def section(bench):
        bench.case("first", [1], slow)
        bench.case("second", [2], slow)

    statuses = [(r["status"], r.get("reason")) for r in run(bench, section, seconds)]
    assert statuses[-1][0] == "skipped" and "no time left" in statuses[-1][1]
    assert bool(seconds) == (statuses[0][0] == "ok") and not bench.failed
    assert "skipped" in report(bench, 1.0)


def test_a_peer_that_is_absent_or_fails_leaves_ours(bench):
    def absent():
        raise Absent("gemlite is not installed")

    def broken():
        raise RuntimeError("out of shared memory")

    def section(bench):
        peers = {"gemlite": absent, "broken": broken, "same": lambda: [lambda: None], "late": lambda: [broken]}
        bench.case("one", [1], lambda: bench.contest([lambda: None], peers, Work(8, {"fp8": 2}), "GB/s", 1.0))

    (record,) = run(bench, section)
    peers = record["peers"]
    assert record["status"] == "ok" and peers["gemlite"] == {"status": "absent", "reason": "gemlite is not installed"}
    assert peers["broken"]["status"] == peers["late"]["status"] == "failed" and peers["same"]["ratio"] > 0
    assert record["floor_seconds"] == pytest.approx(8e-9) and record["ceiling_fraction"] > 0
    text = report(bench, 1.0)
    assert "gemlite is not installed" in text and "broken (failed in some / one): RuntimeError: out of" in text


def test_the_ratio_of_the_record_is_that_of_its_baseline(bench, monkeypatch):
    times = {"ours": Timing((1.0, 2.0, 2.0), "graph"), "peer": Timing((2.0, 6.0, 5.0), "graph")}
    monkeypatch.setattr("benchmarks.gpu.bench.compare", lambda *_: times)
    found = bench.contest([None], {"peer": lambda: [lambda: None]}, Work(0), "GB/s", 4.0, baseline="peer")
    assert (found.value, found.ratio, found.baseline) == (2.0, 2.5, "peer")


def test_the_floor_is_the_larger_of_moving_and_computing():
    ceilings = {"copy": 10.0, "bf16": 2.0, "fp8": 4.0}
    assert Work(100, {"bf16": 6, "fp8": 4}).floor(ceilings) == 10.0
    assert Work(10, {"bf16": 6, "fp8": 4}).floor(ceilings) == 4.0
    assert Work(10, {"fp8": 4}).floor({"copy": 1.0}) is None


def test_contenders_take_turns():
    order = []
    machine = Machine(torch.device("cpu"), interpreted=True, tiny=True)
    timings = compare(machine, {name: [lambda name=name: order.append(name)] * 2 for name in "ab"})
    assert "".join(order) == "aabb" * 2 and timings["a"].launch == "cpu"


class FakeCuda:
    """Of `torch.cuda` what timing uses, without a GPU: events of a clock that each replay moves, and graphs that refuse
    what waits for the device."""

    def __init__(self):
        self.now, self.strict = 0.0, False

    def install(self, monkeypatch):
        cuda = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = cuda.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        class Graph:
            def replay(self):
                cuda.now += 1.0

        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes = {
            "Event": Event, "CUDAGraph": Graph,
            "Stream": lambda device: stream, "current_stream": lambda device: stream,
            "stream": lambda stream: contextlib.nullcontext(), "graph": lambda graph: contextlib.nullcontext(),
            "synchronize": lambda device: None, "set_sync_debug_mode": self.set_mode,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def set_mode(self, mode):
        self.strict = mode == "error"

    def waits(self):
        if self.strict:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.now += 4.0


def test_what_waits_for_the_device_is_launched_from_python(monkeypatch):
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr("benchmarks.gpu.timing._FLUSH_BYTES", 16)
    machine = Machine(torch.device("cpu"), interpreted=False, tiny=True)
    contenders = {"graph": [lambda: None] * 2, "waits": [cuda.waits]}
    timings = compare(machine, contenders, patience=0.0)
    assert (timings["graph"].launch, timings["graph"].seconds) == ("graph", 0.5e-3)
    assert (timings["waits"].launch, timings["waits"].seconds) == ("stream", 4e-3)
    assert "synchronizing" in timings["waits"].why and not cuda.strict
    assert timings["waits"].ratio_to(timings["graph"]) == 8
    assert {timing.launch for timing in compare(machine, contenders, graph=False, patience=0.0).values()} == {"stream"}


@pytest.mark.parametrize(
    ("reached", "unit", "text"),
    [
        (3.4, "x", "aim >= 3.00x of BF16: 3.40x ok"),
        (2.1, "x", "aim >= 3.00x of BF16: 2.10x short"),
        (None, "x", "aim >= 3.00x of BF16: not measured"),
        (4.0, "%", "aim >= 300 % of BF16: 400 % ok"),
    ],
)
def test_aims_beside_what_was_measured(reached, unit, text):
    assert str(Aim("of BF16", 3.0, reached, unit)) == text


def test_the_table_fits(bench):
    peers = {f"a library with a long name {i}": {"status": "ok", "ratio": 1.5} for i in range(7)}
    record = {
        "name": "some / a case of a long name with many words in it", "shape": [27648, 5120], "value": 4321.0,
        "unit": "GB/s", "ceiling_fraction": 0.9, "peers": peers, "aims": [{"text": str(Aim("of x" * 9, 3.0, 1.0))}],
    }  # fmt: skip
    lines = row(record)
    assert max(map(len, lines)) <= WIDTH and "90 % of ceiling" in lines[0]
    assert all(f"{name} 1.50x" in " ".join(lines) for name in peers)


# ---- checks ---------------------------------------------------------------------------------------------------------


def test_checks_refuse_what_is_wrong():
    x = torch.randn(4, 5)
    assert expect_close("x", x * (1 + 1e-4), x, 1e-3) == pytest.approx(1e-4, rel=0.1)
    for wrong in (x * 1.01, x * float("nan"), x * float("inf"), torch.zeros_like(x), x[:, :4]):
        with pytest.raises(WrongResult):
            expect_close("x", wrong, x, 1e-3)
    expect_equal("x", x, x.clone())
    for wrong in (x + 1, None, x.double(), x[:2]):
        with pytest.raises(WrongResult):
            expect_equal("x", wrong, x)


def test_checked_rows_have_both_ends():
    rows = some_rows(1000, 96, torch.device("cpu"))
    assert rows[0] == 0 and rows[-1] == 999 and 64 < len(rows) <= 96 and len(some_rows(5, 96, "cpu")) == 5


def test_a_kernel_that_is_fast_and_wrong_fails(tmp_path, monkeypatch, capsys):
    def wrong(x, **options):
        made = numerics.quantize(x, **options)
        codes = made.codes.clone()
        codes[-1, -1] ^= 1
        parts = {"codes": codes, "scale": made.scale, "macro": made.macro}
        return SimpleNamespace(_asdict=lambda: parts)

    monkeypatch.setattr("mxfp4_kernels.quantize", wrong)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command.main(["--tiny", "--only", "quantize_pack", "--out", str(tmp_path)]) == 1
    records = json.loads((tmp_path / "gpu_quantize_pack.json").read_text())
    assert {r["status"] for r in records} == {"failed"} and "1 of" in records[0]["reason"]
    table = capsys.readouterr().out.split(f"\n{INTERPRETER}; ")[-1]
    assert " 0 skipped" in table and max(map(len, table.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("model", "billions"),
    [(shapes.QWEN_1_5B, 1.31), (shapes.QWEN_3B, 2.77), (shapes.QWEN_7B, 6.53), (shapes.QWEN_32B, 31.0)],
    ids=lambda value: getattr(value, "name", None),
)
def test_shapes_make_up_the_published_parameter_counts(model, billions):
    """Without embeddings, as the model cards give them."""
    counts = {"q_proj": 2, "k_proj": 2, "gate_proj": 2, "down_proj": 1}
    linears = sum(counts[name] * n * k for name, (n, k) in model.linears.items())
    assert model.num_hidden_layers * linears / 1e9 == pytest.approx(billions, rel=0.01)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for interpret, arguments, message in (("0", [], "TRITON_INTERPRET=1"), ("1", [], "add --tiny")):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert command.main(["--out", str(tmp_path / "out"), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_section_is_one_of_the_documented():
    text = (gpu_tables.RESULTS.parents[1] / "docs" / "performance.md").read_text()
    for name in command.SECTIONS:
        module = command.importlib.import_module(f"benchmarks.gpu.sections.{name}")
        assert module.NAME == name and module.SHARE > 0 and f"| `{name}` |" in text


def test_time_that_is_not_needed_goes_to_the_sections_after(bench, monkeypatch):
    given = {}
    monkeypatch.setattr(bench, "section", lambda name, run, seconds: given.update({name: seconds}))
    command.run_sections(bench, ["ceilings", "quantize_pack"], command.time.perf_counter() + 100)
    shares = quantize_pack.SHARE, command.importlib.import_module("benchmarks.gpu.sections.ceilings").SHARE
    assert given["quantize_pack"] == pytest.approx(100, abs=1)
    assert given["ceilings"] == pytest.approx(100 * shares[1] / sum(shares), abs=1)


@pytest.mark.parametrize("measured", [True, False])
def test_the_time_of_a_run_begins_with_it_and_nothing_measured_is_an_error(tmp_path, monkeypatch, capsys, measured):
    """However long this process has lived, which imported the module before."""
    now = command.time.perf_counter()
    monkeypatch.setattr(command, "time", SimpleNamespace(perf_counter=lambda: now + 1e6))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = []

    def run_sections(bench, names, end):
        given.append(end - now - 1e6)
        for name in names:
            bench.section(name, lambda bench: bench.case("one", [1], fine), 60.0 if measured else 0.0)

    monkeypatch.setattr(command, "run_sections", run_sections)
    assert command.main(["--tiny", "--only", "quantize_pack", "--out", str(tmp_path)]) == (0 if measured else 1)
    assert given == [pytest.approx(475)]
    assert ("nothing was measured" in capsys.readouterr().err) != measured


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_case_that_takes_too_long_is_stopped(bench, wrapped):
    def endless():
        try:
            while True:
                command.time.sleep(0.01)
        except Absent as error:
            if wrapped:
                raise RuntimeError("an error of some library") from error
            raise

    with command.stopped_after(bench, 0.1):
        (record,) = run(bench, lambda bench: bench.case("endless", [1], endless))
    assert record["status"] == "skipped" and record["reason"] == "stopped at the time limit"


# ---- documents ------------------------------------------------------------------------------------------------------


def written(folder, **changed):
    record = {
        "name": "decode_w4a16 / plain, M = 1", "shape": [4096, 4096], "status": "ok", "value": 3000.0, "unit": "GB/s",
        "baseline": "cuBLAS BF16", "ratio": 3.2, "ceiling_fraction": 0.7, "hardware": "NVIDIA H200", "tiny": False,
        "command": "python -m benchmarks.gpu --out x", "date": "2026-11-21", "versions": {},
        "peers": {"cuBLAS BF16": {"status": "ok", "ratio": 3.2}, "gemlite": {"status": "absent", "reason": "no"}},
        "aims": [{"text": "aim >= 3.00x of cuBLAS BF16: 3.20x ok"}], **changed,
    }  # fmt: skip
    skipped = {**record, "name": "decode_w4a16 / plain, M = 4", "status": "skipped", "reason": "no time left"}
    del skipped["peers"], skipped["aims"]
    (folder / "gpu_decode_w4a16.json").write_text(json.dumps([record, skipped]))


def test_words_where_nothing_was_measured(tmp_path):
    assert "No GPU number has been measured" in gpu_tables.gpu(tmp_path)
    assert gpu_tables.COMMAND in gpu_tables.gpu(tmp_path)


def test_a_table_of_what_was(tmp_path):
    written(tmp_path)
    text = gpu_tables.gpu(tmp_path)
    assert "| plain, M = 1 | 4096x4096 | 3000 GB/s | 70 % | 3.20x | aim >= 3.00x of cuBLAS BF16: 3.20x ok |" in text
    assert "Not measured: plain, M = 4 4096x4096: no time left" in text and "NVIDIA H200" in text
    assert "](plots/gpu_decode_w4a16.svg)" in text
    (figure,) = gpu_tables.figures(tmp_path).values()
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plain, M = 1, 4096x4096"]


@pytest.mark.parametrize("changed", [{"hardware": INTERPRETER}, {"tiny": True}])
def test_interpreted_and_tiny_runs_are_never_published(tmp_path, changed):
    written(tmp_path, **changed)
    with pytest.raises(ValueError, match="no number to publish"):
        gpu_tables.gpu(tmp_path)
