# SPDX-License-Identifier: Apache-2.0
"""Router telemetry while a mixture of experts trains."""

import json
import logging

import pytest
from grpo_runs import TOKENIZER, trainer_factory
from moe_models import make_moe
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import router_statistics
from hf_mxfp4.rl.callbacks.routers import ROUTER_FILE


LOADS = {"router/load_entropy", "router/load_max_over_mean", "router/dead_experts"}
AGREEMENTS = {"router/agreement", "router/agreement_min_layer"}


@pytest.fixture
def build(tmp_path):
    folder = tmp_path / "moe"
    make_moe().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    factory = trainer_factory(tmp_path)

    def make(scheme=None, **options):
        policy = AutoModelForCausalLM.from_pretrained(folder, quantization_config=scheme)
        return factory(policy=policy, **{"max_steps": 3, **options})

    return make


def metrics_of(trainer):
    return {
        entry["step"]: {name: value for name, value in entry.items() if name.startswith("router/")}
        for entry in trainer.state.log_history
        if "loss" in entry
    }


def test_routers_are_measured_every_few_steps_and_after_the_last(build, tmp_path):
    trainer = build(MXFP4RLConfig(outlier_fallback=None), router_every=2)
    trainer.train()
    metrics = metrics_of(trainer)
    assert [set(metrics[step]) for step in (1, 2, 3)] == [set(), LOADS | AGREEMENTS, LOADS | AGREEMENTS]
    history = trainer.router_callback.history
    layers = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert [(row["step"], row["layer"]) for row in history] == [(step, name) for step in (2, 3) for name in layers]
    for step in (2, 3):
        rows = [row for row in history if row["step"] == step]
        for name in LOADS | {"router/agreement"}:
            values = [row[name.removeprefix("router/")] for row in rows]
            assert metrics[step][name] == pytest.approx(sum(values) / 2)
        assert metrics[step]["router/agreement_min_layer"] == min(row["agreement"] for row in rows)
    lines = (tmp_path / "run" / ROUTER_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == history
    # The last measurement is of the policy as it is now, on the last batch.
    again = router_statistics(trainer.model, *trainer.monitor.last_batch)
    assert [row["agreement"] for row in history[-2:]] == [statistics.agreement for statistics in again]


def test_off_by_default(build, tmp_path):
    trainer = build(MXFP4RLConfig())
    trainer.train()
    assert trainer.router_callback is None and not (tmp_path / "run" / ROUTER_FILE).exists()
    assert not any(metrics_of(trainer).values())


@pytest.mark.parametrize(
    ("scheme", "options", "reason"),
    [
        (None, {"allow_full_precision": True}, "has no quantized layer"),
        (
            MXFP4RLConfig(mode="packed"),
            {"peft_config": LoraConfig(target_modules=["q_proj"], r=2)},
            "has packed layers, whose weights exist in 4 bits only",
        ),
    ],
    ids=["full precision", "packed"],
)
def test_without_something_to_compare_with_the_load_is_measured(build, caplog, scheme, options, reason):
    with caplog.at_level(logging.WARNING, logger="hf_mxfp4"):
        trainer = build(scheme, router_every=3, **options)
    assert "router agreement is not: " in caplog.text and reason in caplog.text
    trainer.train()
    assert set(metrics_of(trainer)[3]) == LOADS
    assert all(row["agreement"] is None for row in trainer.router_callback.history)
