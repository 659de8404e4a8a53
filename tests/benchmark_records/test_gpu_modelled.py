# SPDX-License-Identifier: Apache-2.0
"""What a model says stands beside measurements, in a table of its own, and never among them."""

import json

import pytest

from benchmarks import records
from benchmarks.documents import gpu_tables, model_tables
from benchmarks.gpu import beside
from benchmarks.gpu.report import row


CASE = "decode_w4a16 / plain, M = 1"


def modelled(**changed):
    return {
        "name": CASE, "shape": [4096, 4096], "kind": "modelled", "gpu": "H200", "arch": "sm_90", "status": "ok",
        "value": 6.3, "unit": "us", "ceiling_fraction": 0.47, "baseline": "cuBLAS BF16", "ratio": 2.06, "launches": 1,
        "bottleneck": "issue", "state": "before", "command": "python -m benchmarks.gpu.model", "date": "2026-11-23",
        "versions": {"triton": "3.7.1"}, **changed,
    }  # fmt: skip


def measured(**changed):
    return {
        "name": CASE, "shape": [4096, 4096], "status": "ok", "value": 3000.0, "unit": "GB/s", "baseline": None,
        "ratio": None, "ceiling_fraction": 0.7, "hardware": "NVIDIA H200, 140 GiB", "tiny": False, "date": "2026-11-23",
        "command": "python -m benchmarks.gpu --out x", "versions": {}, **changed,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    beside._all.cache_clear()
    yield tmp_path
    beside._all.cache_clear()


def write(folder, name, *found):
    (folder / f"{name}.json").write_text(json.dumps(found))


def test_a_table_of_measurements_refuses_what_a_model_says(folder):
    write(folder, "gpu_decode_w4a16", measured(), measured(kind="modelled"))
    for table in (gpu_tables.gpu, gpu_tables.figures):
        with pytest.raises(ValueError, match="is modelled; a table of measured numbers cannot have it"):
            table(folder)
    with pytest.raises(ValueError, match="M = 1 is modelled"):
        records.records("gpu_decode_w4a16")


def test_a_table_of_the_model_refuses_measurements(folder):
    write(folder, "gpu_modelled", modelled(), measured())
    with pytest.raises(ValueError, match="is measured; a table of modelled numbers cannot have it"):
        model_tables.modelled()
    with pytest.raises(ValueError, match="is modelled"):
        records.records("gpu_modelled")


def test_records_of_the_model_are_no_section(folder):
    write(folder, "gpu_modelled", modelled())
    assert gpu_tables.gpu(folder) == gpu_tables.NONE_YET and gpu_tables.figures(folder) == {}


def test_before_and_now_side_by_side(folder):
    quantize = {"name": "quantize_pack / rceil", "shape": [8192, 5120], "ratio": None, "gpu": "H100"}
    write(
        folder,
        "gpu_modelled",
        modelled(**quantize),
        modelled(**quantize, state="now", ceiling_fraction=0.884, bottleneck="memory", date="2026-11-24"),
        modelled(),
        modelled(gpu="B200"),
        modelled(gpu="B200", state="now"),
        modelled(gpu="MI355X", status="failed"),
    )
    text = model_tables.modelled()
    assert "| `quantize_pack` rceil | 8192x5120 | 47 % → 88 % |  |  |  |  | 1 | memory |" in text
    assert "| `decode_w4a16` plain, M = 1 | 4096x4096 |  | 2.06x | 2.06x |  | failed |  |  |" in text
    assert "before: `python -m benchmarks.gpu.model`, Triton 3.7.1, 2026-11-23; now: " in text


def test_the_model_stands_beside_a_measurement(folder):
    write(folder, "gpu_modelled", modelled(), modelled(state="now", ratio=2.5), modelled(gpu="B200", ratio=9.0))
    text = " ".join(row(measured()))
    assert "70 % of ceiling" in text and text.endswith("modelled 47 % of ceiling, 2.50x cuBLAS BF16")
    write(folder, "gpu_decode_w4a16", measured())
    assert "| 70 % |  | 47 % of ceiling, 2.50x cuBLAS BF16 |" in gpu_tables.gpu(folder)


@pytest.mark.parametrize("changed", [{"shape": [2, 2]}, {"hardware": "NVIDIA L4"}, {"name": "other"}, {"shape": "all"}])
def test_nothing_stands_beside_what_was_not_modelled(folder, changed):
    write(folder, "gpu_modelled", modelled())
    assert beside.beside(measured(**changed)) == ""


def test_without_records_of_the_model(folder):
    assert beside.beside(measured()) == ""


def test_records_as_they_are():
    found = records.records("gpu_modelled", modelled=True)
    cases = {(r["name"], tuple(r["shape"])) for r in found}
    assert {record["kind"] for record in found} == {"modelled"} and len(cases) > 40
    assert {record["gpu"] for record in found} == set(model_tables.COLUMNS)
