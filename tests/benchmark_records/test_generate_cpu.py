# SPDX-License-Identifier: Apache-2.0
"""The benchmark of `generate` on CPUs: that it runs, compares what belongs together, and notices a wrong token."""

import json

import pytest
import torch
from tiny_models import make_model

from benchmarks import generate_cpu
from benchmarks.generate_cpu import CACHED, KEPT, PACKED, PACKED_CACHED, PLAIN, Contender, Seconds


def test_it_runs_on_a_model_of_two_layers(tmp_path):
    make_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "tiny")
    out, threads = tmp_path / "records.json", torch.get_num_threads()
    options = ["--prompt", "4", "--tokens", "2", "--rounds", "1", "--threads", "1", "--batches", "1", "2"]
    generate_cpu.main(["--model", str(tmp_path / "tiny"), "--out", str(out), *options])
    records = json.loads(out.read_text())
    arms = ["bfloat16", PLAIN, CACHED, KEPT, PACKED, PACKED_CACHED]
    assert [(r["name"], r["batch"]) for r in records] == [(arm, batch) for batch in (1, 2) for arm in arms]
    assert all(r["model"] == "tiny" and r["threads"] == 1 and r["value"] > 0 < r["cpu_ratio"] for r in records)
    assert [r["shape"] for r in records[::6]] == [[1, 4, 2], [2, 4, 2]]
    assert [r.get("compared_with") for r in records[:6]] == [None, CACHED, None, CACHED, PACKED_CACHED, None]
    assert torch.get_num_threads() == threads


def test_ratios_are_of_one_round():
    baseline, other = [Seconds(2.0, 1.0), Seconds(8.0, 1.0), Seconds(4.0, 1.0)], [Seconds(4.0, 4.0)] * 3
    times = {"bfloat16": baseline, PACKED: other, PACKED_CACHED: [Seconds(1.0, 2.0)] * 3}
    _, packed, _ = generate_cpu.records_of(times, written=8)
    assert (packed["value"], packed["ratio"]) == (2.0, 1.0)  # 4 seconds; over 2, 8 and 4
    assert (packed["cpu_value"], packed["cpu_ratio"]) == (2.0, 0.25)
    assert (packed["time_over_it"], packed["cpu_time_over_it"]) == (4.0, 2.0)


def test_other_tokens_are_an_error():
    models = {name: make_model("llama", seed=name == PLAIN) for name in generate_cpu.SAME}
    found = {name: Contender(model) for name, model in models.items()}
    found |= {other: found[KEPT] for other in generate_cpu.SAME.values()}
    with pytest.raises(RuntimeError, match="wrote different tokens"):
        generate_cpu.measure(found, torch.arange(2, 6)[None], 8, 1)


def test_without_a_folder_the_model_has_the_shape_of_smollm2():
    config = generate_cpu.smollm2_config()
    linears = 30 * (576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536)
    with torch.device("meta"):
        model = generate_cpu.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == linears + 49152 * 576 + 61 * 576 == 134515008
