# SPDX-License-Identifier: Apache-2.0
"""How far a step moves quantized weights over how far it moves their masters."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DeepSpeedOptimizerWrapper
from factors import factors_config
from grpo_runs import ResumableTrainer, logged, train_plainly
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Experts, MXFP4Linear
from hf_mxfp4.backends import fake_quantize
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.lab import health_checks, read_run
from hf_mxfp4.rl import StepMovementCallback
from hf_mxfp4.rl.callbacks.movement import Movement, MovementSums
from hf_mxfp4.rl.callbacks.weight_samples import sample_weights


# Plain MXFP4: with a 6 in its block the grid is 0, .5, 1, 1.5, 2, 3, 4, 6. Of two values as near, the one of the even
# code is taken: 1 for .75 and for 1.25.
PLAIN = factors_config(macro_block=None, outlier_fallback=None)
SCHEMES = {
    "default": factors_config(),
    "rceil": PLAIN,
    "blockwise": factors_config(scale_rule="even", macro_search="blockwise", outlier_fallback=None),
    "static": factors_config(macro_search="static", outlier_fallback=None),
    "tiles": factors_config(macro_block=None, outlier_fallback=None, weight_block="32x32"),
}
STEP = 2.0**-20


def layer(config=PLAIN, rows=1):
    linear = MXFP4Linear(32, rows, bias=False, config=config)
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.weight[:, 0] = 6.0
    return linear


def run(callback, model, moves, state=None, optimizer=None, log=True):
    """Apply one function of the step to the weights per optimizer step, as a trainer does; the logs of each step."""
    state = state or SimpleNamespace(global_step=0, max_steps=len(moves), log_history=[])
    callback.on_train_begin(None, state, None, model=model)
    logged = []
    for move in moves:
        callback.on_step_begin(None, state, None, optimizer=optimizer)
        if optimizer is None:
            callback.on_pre_optimizer_step(None, state, None, optimizer=None)
        with torch.no_grad():
            move(model)
        if optimizer is not None:
            callback.on_pre_optimizer_step(None, state, None, optimizer=optimizer)
        state.global_step += 1
        callback.on_step_end(None, state, None, optimizer=optimizer)
        if log:
            state.log_history.append({"step": state.global_step})
            logged.append({})
            callback.on_log(None, state, None, logs=logged[-1])
    return logged


def add(index, value):
    def move(model):
        model.weight.view(-1)[index] += value

    return move


def stay(model):
    pass


def movement(before, step, scheme):
    sums = MovementSums()
    rows = scheme.block_rows
    sums.add(before.unflatten(0, (-1, rows)), (before + step).unflatten(0, (-1, rows)), scheme, "auto", before.numel())
    return sums.movement


# ---- the number -----------------------------------------------------------------------------------------------------


def test_weights_on_boundaries_move_as_far_as_they_must():
    model = layer()
    with torch.no_grad():
        model.weight[0, 5], model.weight[0, 6] = 0.75, 1.25

    def move(m):
        m.weight[0, 5] -= STEP  # to .5
        m.weight[0, 6] += STEP  # to 1.5
        m.weight[0, 7] += STEP  # stays 1

    callback = StepMovementCallback()
    (logs,) = run(callback, model, [move])
    # Two of three elements move by half a unit along their steps: (2 * .5 * STEP) / (3 * STEP**2).
    assert logs["movement/total"] == pytest.approx(1 / (3 * STEP), rel=1e-12)
    assert logs["movement/flipped_share"] == 2 / 32
    # The mean squared error is 2 * .25**2 / 32, so that values lie about .2165 apart.
    chance = math.sqrt(math.sqrt(12 * 0.125 / 32) * 3 * STEP**3) / (3 * STEP**2)
    assert logs["movement_se/total"] == pytest.approx(chance, rel=1e-12)
    (entry,) = callback.history
    assert entry["step"] == 1 and entry["total"]["n_changed"] == 2 and entry["total"]["n_weights"] == 32


def test_of_a_single_change_the_error_is_the_whole():
    model = layer(rows=2)
    with torch.no_grad():
        model.weight[0, 5] = 0.75

    def move(m):
        m.weight[:, 5] -= STEP

    (logs,) = run(StepMovementCallback(), model, [move])
    assert logs["movement/total"] == pytest.approx(0.25 / STEP)
    assert logs["movement_se/total"] == pytest.approx(0.25 / STEP)


def test_values_that_move_with_their_scale_count_with_the_direction_they_take():
    before, step = torch.ones(1, 32), torch.zeros(1, 32)
    before[0, 0], before[0, 1] = 6.0, 0.6
    step[0, 0], step[0, 1] = 2.0, -STEP  # the scale doubles: 6 becomes 8, and .5 becomes 1 against the step
    found = movement(before, step, PLAIN.gemms().fprop.right)
    assert found.ratio == pytest.approx((2.0 * 2.0 - 0.5 * STEP) / (4.0 + STEP**2), rel=1e-12)
    assert found.n_changed == 2


@pytest.mark.parametrize("name", SCHEMES)
def test_in_general_position_it_is_one(name):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(512, 512, generator=generator) * 0.02
    step = torch.randn(512, 512, generator=generator) * 2e-5
    found = movement(weights, step, SCHEMES[name].gemms().fprop.right)
    assert abs(found.ratio - 1) < 3 * found.standard_error < 0.5


@pytest.mark.parametrize("name, at_least", [("default", 20), ("rceil", 300), ("blockwise", 200)])
def test_weights_of_16_bits_jump(name, at_least):
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(512, 512, generator=generator) * 0.02).bfloat16().float()
    step = torch.randn(512, 512, generator=generator) * 1e-7
    found = movement(weights, step, SCHEMES[name].gemms().fprop.right)
    assert at_least < found.ratio - 2 * found.standard_error < 2 * at_least
    # Twice the step, half the ratio.
    if name == "rceil":
        assert movement(weights, 2 * step, PLAIN.gemms().fprop.right).ratio == pytest.approx(found.ratio / 2, rel=0.02)


def test_the_standard_error_is_that_of_repeated_measurements():
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(200):
        weights = torch.randn(64, 128, generator=generator) * 0.02
        step = torch.randn(64, 128, generator=generator).sign() * 1e-5
        found.append(movement(weights, step, PLAIN.gemms().fprop.right))
    ratios = torch.tensor([one.ratio for one in found])
    errors = torch.tensor([one.standard_error for one in found])
    assert abs(ratios.mean() - 1) < 3 * ratios.std() / 200**0.5
    assert 0.8 < errors.square().mean().sqrt() / ratios.std() < 1.25


def test_no_change_at_all_is_no_certainty():
    """A quarter of a change was to be expected: zero is within the error."""
    found = movement(layer().weight.detach() + 0.1, torch.full((1, 32), 2.0**-9), PLAIN.gemms().fprop.right)
    assert found.n_changed == 0 and found.ratio == 0 and found.standard_error > 0.5


def test_masters_in_16_bits_are_measured_too():
    model = layer()
    model.weight.data = model.weight.data.bfloat16()
    (logs,) = run(StepMovementCallback(), model, [add(5, 0.5)])  # from 1 to 1.5
    assert logs["movement/total"] == 1.0


# ---- when -----------------------------------------------------------------------------------------------------------


def test_the_first_step_that_moves_then_every_few_and_the_last():
    callback = StepMovementCallback(every=4)
    moving = add(5, STEP)
    logs = run(callback, layer(), [stay, stay, moving, stay, moving, moving, moving, stay, stay, stay, moving])
    # Due at 4, 8 and 11: no master moves in 4 nor in 8, 9 and 10.
    assert [entry["step"] for entry in callback.history] == [3, 5, 11]
    assert [step for step, entry in enumerate(logs, 1) if "movement/total" in entry] == [3, 5, 11]


def test_nothing_is_copied_in_steps_that_are_not_measured():
    callback = StepMovementCallback(every=3)
    held = []

    def move(m):
        held.append(callback._before is not None)
        m.weight[0, 5] += STEP

    run(callback, layer(), [move] * 6)
    assert held == [True, False, True, False, False, True] and callback._before is None


def test_deepspeed_steps_in_the_backward_pass():
    callback = StepMovementCallback()
    optimizer = DeepSpeedOptimizerWrapper.__new__(DeepSpeedOptimizerWrapper)
    run(callback, layer(), [add(5, 0.5)], optimizer=optimizer)
    assert callback.history[0]["total"]["ratio"] == 1.0


def test_weights_that_are_not_finite_are_passed_over():
    callback = StepMovementCallback()
    run(callback, layer(), [add(5, float("nan")), lambda m: m.weight[0, 5].fill_(1.0), add(5, 0.5)])
    assert [entry["step"] for entry in callback.history] == [3]


# ---- what -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_layer_types_and_experts(family):
    model = make_model(family)
    quantize_linears(model, PLAIN)
    experts = next(m for m in model.modules() if isinstance(m, MXFP4Experts))
    with torch.no_grad():
        experts.rows_first(experts.down_proj)[2, 3].fill_(1.0)
        experts.rows_first(experts.down_proj)[2, 3, 0] = 6.0

    def move(m):
        experts.rows_first(experts.down_proj)[2, 3, 5] += 0.5
        m.model.layers[1].self_attn.q_proj.weight[0, 0] += 1e-3

    callback = StepMovementCallback()
    (logs,) = run(callback, model, [move])
    types = {sample.kind for sample in callback.samples}
    assert types == {"q_proj", "k_proj", "v_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"}
    n_weights = sum(p.numel() for n, p in model.named_parameters() if "proj" in n and not n.endswith("bias"))
    assert sum(sample.n_weights for sample in callback.samples) == n_weights
    assert logs["movement/experts.down_proj"] == 1.0
    assert set(callback.history[0]) == {
        "step",
        "total",
        "q_proj",
        "experts.down_proj",
    }  # what did not move has no ratio
    assert callback.history[0]["total"]["n_weights"] == n_weights


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("max_weights", [10**9, 4000])
def test_watched_rows_have_the_values_of_the_whole_matrix(name, max_weights):
    config = SCHEMES[name]
    model = nn.Module()
    model.a_proj, model.b_proj, model.more = (
        MXFP4Linear(96, 48, config=config),
        MXFP4Linear(64, 40, config=config),
        None,
    )
    torch.manual_seed(0)
    seen = 0
    for sample in sample_weights(model, max_weights):
        (matrix,) = sample.matrices
        weight, size = matrix.weight(), sample.scheme.block_rows
        padded = nn.functional.pad(weight, (0, 0, 0, -len(weight) % size)).unflatten(0, (-1, size))
        assert torch.equal(sample.take(), padded[sample.units[0]])
        expected = nn.functional.pad(matrix.effective_rows(weight), (0, 0, 0, -len(weight) % size))
        quantized = fake_quantize(sample.take(), sample.scheme, "auto")
        assert torch.equal(quantized, expected.unflatten(0, (-1, size))[sample.units[0]])
        seen += sample.n_weights
    assert seen == (96 * 48 + 64 * 40 if max_weights > 4000 else seen) and seen <= max(max_weights, 32 * (96 + 64))


def test_the_weights_watched_are_bounded_and_evenly_spread():
    model = make_model("qwen3_moe", layers=2)
    quantize_linears(model, PLAIN)
    everything = sample_weights(model, 10**9)
    total = sum(sample.n_weights for sample in everything)
    few = sample_weights(model, total // 9)
    assert {sample.kind for sample in few} == {sample.kind for sample in everything}
    assert sum(sample.n_weights for sample in few) == pytest.approx(total / 9, rel=0.1)
    for kind in {sample.kind for sample in few}:
        shares = [sum(s.n_weights for s in found if s.kind == kind) for found in (few, everything)]
        assert shares[0] / shares[1] == pytest.approx(1 / 9, rel=0.35)
    down = [s for s in few if s.kind == "experts.down_proj"]
    assert {m.expert for s in down for m in s.matrices} == {0, 1, 2, 3}
    assert {s.kind for s in sample_weights(model, 1)} == {sample.kind for sample in everything}


def frozen():
    model = make_model()
    quantize_linears(model, PLAIN)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))


def packed():
    model = make_model()
    quantize_linears(model, factors_config(mode="packed"))
    return model


@pytest.mark.parametrize(
    "model, reason",
    [
        (lambda: nn.Linear(2, 2), "no quantized layer with master weights"),
        (packed, "no quantized layer with master weights"),
        (frozen, "frozen"),
        (lambda: layer(factors_config(fprop={"rotation": "deterministic-16"})), "rotates both operands"),
        (lambda: layer(factors_config(macro_block=None, fprop={"weight": "rceil+stochastic"})), "stochastically"),
        (lambda: layer(factors_config(fprop={"weight": "full"})), "in full precision"),
    ],
    ids=["no-layer", "packed", "frozen", "rotated", "random", "full"],
)
def test_models_without_anything_to_measure_are_refused(model, reason):
    state = SimpleNamespace(global_step=0, max_steps=1, log_history=[])
    with pytest.raises(ValueError, match=f"no step of .* can be measured: .*{reason}"):
        StepMovementCallback().on_train_begin(None, state, None, model=model())


@pytest.mark.parametrize("options", [{"every": 0}, {"max_weights": 0}])
def test_bad_arguments(options):
    with pytest.raises(ValueError, match="must be at least 1"):
        StepMovementCallback(**options)


# ---- in runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def undrawn(monkeypatch):
    """The health checks are made of the log of a run: its page is not drawn."""
    monkeypatch.setattr("hf_mxfp4.rl.callbacks.report.write_run_report", lambda folder: None)


def on_ties(build):
    """A policy whose masters are numbers of 16 bits, as nothing but loading could undo."""
    policy = build().model
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.bfloat16())
    return policy


def test_a_run_logs_it_and_its_report_has_an_alarm(build, undrawn, tmp_path, caplog):
    trainer = build(policy=on_ties(build), movement_every=2, report_every=100, learning_rate=1e-7)
    with caplog.at_level(logging.INFO, logger="hf_mxfp4"):
        trainer.train()
    totals = logged(trainer, "movement/total")
    assert list(totals) == [1, 2, 4] and totals[1] > 10 and logged(trainer, "movement_se/total")[1] < totals[1] / 3
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    keys = set().union(*trainer.state.log_history)
    assert {f"movement/{kind}" for kind in kinds} | {f"movement_se/{kind}" for kind in kinds} <= keys
    assert 0 < logged(trainer, "movement/flipped_share")[1] < 0.05
    assert "movement of quantized weights in a step, first and every 2: 448 rows of 14 matrices" in caplog.text
    assert caplog.text.count("step 1: quantized weights moved") == 1 and "dither_ties" in caplog.text
    (check,) = [check for check in health_checks(read_run(tmp_path / "run")) if check.title == "Step movement"]
    assert check.state == "red" and "(step 1)" in check.finding and "ties" in check.advice


def test_the_alarm_is_two_standard_errors_above_its_limit(caplog):
    callback = StepMovementCallback()
    callback._warn(1, Movement(4.9, 1.0, 10, 100))  # from 2.9 on
    assert not caplog.text
    callback._warn(2, Movement(5.1, 1.0, 10, 100))
    assert "step 2: quantized weights moved 5.1 +- 2 times as far" in caplog.text


def test_masters_in_general_position_raise_no_alarm(build, undrawn, tmp_path, capsys):
    trainer = build(movement_every=50, report_every=100)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.2345)  # whatever loading made of them, they lie anywhere now
    trainer.train()
    totals, errors = logged(trainer, "movement/total"), logged(trainer, "movement_se/total")
    assert list(totals) == [1, 4]
    assert all(abs(totals[step] - 1) < 4 * errors[step] < 1 for step in totals)
    assert "times as far" not in capsys.readouterr().err
    (check,) = [check for check in health_checks(read_run(tmp_path / "run")) if check.title == "Step movement"]
    assert check.state == "green"


def test_a_warm_up_from_zero_is_measured_where_it_moves(build):
    trainer = build(movement_every=50, lr_scheduler_type="linear", warmup_steps=2)
    trainer.train()
    assert [entry["step"] for entry in trainer.movement_callback.history] == [2, 4]


def test_switched_off_or_nothing_to_measure(build, capsys):
    assert build(movement_every=0).movement_callback is None
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    for scheme in (factors_config(mode="packed"), factors_config()):
        assert build(movement_every=50, scheme=scheme, peft_config=lora).movement_callback is None
    assert "no movement" not in capsys.readouterr().err
    assert (
        build(movement_every=50, scheme=factors_config(fprop={"rotation": "deterministic-16"})).movement_callback
        is None
    )
    assert "no movement of quantized weights is measured: its fprop rotates" in capsys.readouterr().err


def test_any_trainer_logs_it(tmp_path):
    make_model(hidden=32, intermediate=48).save_pretrained(tmp_path / "base")
    callback = StepMovementCallback(every=2)

    class Watched(ResumableTrainer):
        def __init__(self, model, args, **kwargs):
            args.logging_steps = 1
            super().__init__(model, args, callbacks=[callback], **kwargs)

    trainer = train_plainly(Watched, tmp_path / "base", factors_config(), tmp_path / "out")
    totals = logged(trainer, "movement/total")
    assert list(totals) == [1, 2, 4]
    assert totals[4] == callback.history[-1]["total"]["ratio"]
