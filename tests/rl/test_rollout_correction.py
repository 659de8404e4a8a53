# SPDX-License-Identifier: Apache-2.0
"""Importance weights between the policy that samples and the one that trains: on numbers, and in the trainer."""

import pytest
import torch
from grpo_runs import MEASURED, NOISY, SAMPLED, log_probs, logged, mixture, prompts, rollout, seen_by_loss
from peft import LoraConfig
from transformers import LogitsProcessorList, TopKLogitsWarper

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl import rollout as correction
from hf_mxfp4.rl.rollout import CORRECTION_MODES, MismatchSums, importance_ratios, limit_ratios


RATIOS = torch.tensor([[4.0, 0.5], [1.5, 1.0]], dtype=torch.float64)
LIMITS = {
    "token_truncate": [[2.0, 0.5], [1.5, 1.0]],
    "token_mask": [[0.0, 0.5], [1.5, 1.0]],
    "sequence_truncate": [[1.9], [1.5]],  # products 2 and 1.5
    "sequence_mask": [[0.0], [1.5]],
}


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_weights_by_hand(mode):
    cap = 1.9 if mode.startswith("sequence") else 2.0
    weights = limit_ratios(importance_ratios(RATIOS.log(), mode), mode, cap)
    torch.testing.assert_close(weights, torch.tensor(LIMITS[mode], dtype=torch.float64))


def test_ratios_beyond_all_measure_stay_finite():
    assert importance_ratios(torch.tensor([[1e4, -1e4]]), "token_mask").isfinite().all()


def measured(log_ratio, mask=None, mode="token_truncate"):
    sums = MismatchSums()
    sums.add(log_ratio, torch.ones_like(log_ratio) if mask is None else mask, mode, 2.0)
    return sums.measures(lambda rows: rows)


def test_estimates_meet_the_exact_values():
    torch.manual_seed(0)
    trained, sampling = torch.randn(2, 8).log_softmax(-1)
    exact = (sampling.exp() * (sampling - trained)).sum().item()
    tokens = torch.multinomial(sampling.exp(), 200_000, replacement=True)
    found = measured((trained - sampling)[tokens].unsqueeze(1))
    assert found["sampling/kl"] == pytest.approx(exact, rel=0.02)
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.02)
    # Of infinitely many samples: 1 / E[w^2].
    second = (sampling.exp() * (2 * (trained - sampling)).exp()).sum().item()
    assert found["sampling/effective_sample_size"] == pytest.approx(1 / second, rel=0.05)
    assert found["sampling/effective_sample_size_sequence"] == pytest.approx(1 / second, rel=0.05)


def test_measures_by_hand():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    ratios = torch.tensor([[4.0, 0.5, 9.0], [9.0, 1.0, 1.05], [9.0, 9.0, 9.0]])
    found = measured(ratios.log() * mask, mask)
    name = "sampling/importance_sampling_ratio/"
    assert [found[name + key] for key in ("min", "mean", "max", "clipped")] == pytest.approx([0.5, 6.55 / 4, 4, 0.25])
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(torch.tensor(4.0).log().item())
    assert found["sampling/effective_sample_size"] == pytest.approx(6.55**2 / (4 * (18.25 - 1 + 1.05**2)))
    by_mode = {
        "token_truncate": (2 + 0.5 + 1 + 1.05) ** 2 / (4 * (4 + 0.25 + 1 + 1.05**2)),
        "token_mask": (0.5 + 1 + 1.05) / 4,  # the mean is below 2.55^2 / (4 * 2.3525)
        "sequence_truncate": (2 + 1.05) ** 2 / (2 * (4 + 1.05**2)),  # products 2 and 1.05
    }
    for mode, expected in by_mode.items():
        share = measured(ratios.log() * mask, mask, mode=mode)["sampling/effective_sample_size_weights"]
        assert share == pytest.approx(expected), mode
    none_left = measured(torch.full((2, 2), 3.0), mode="sequence_mask")
    assert none_left["sampling/effective_sample_size_weights"] == 0.0
    assert measured(torch.zeros(2, 3), torch.zeros(2, 3)) == {}


def test_the_divergence_is_measured_by_position():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    ratios = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.5, 1.0], [1.0] * 6])
    found = measured(ratios.log(), mask)
    by_position = {name: value for name, value in found.items() if name.startswith("sampling/kl/")}
    # w - 1 - log w: 0.306853 of the second of seven tokens, 0.193147 of the first of two.
    expected = {"sampling/kl/1-4": 0.306853 / 7, "sampling/kl/5-8": 0.193147 / 2}
    assert by_position == pytest.approx(expected, rel=1e-4)
    assert list(by_position) == list(expected)


def test_completions_of_four_tokens_have_no_divergence_by_position():
    assert not [name for name in measured(torch.ones(2, 4)) if name.startswith("sampling/kl/")]


def test_measures_do_not_depend_on_how_tokens_are_spread_over_processes():
    torch.manual_seed(0)
    mask = torch.rand(8, 5) > 0.3
    log_ratio = 0.5 * torch.randn(8, 5) * mask
    ranks = []  # gathering concatenates their rows
    for part, part_mask in zip(log_ratio.split([3, 5]), mask.split([3, 5]), strict=True):
        sums = MismatchSums()
        sums.add(part, part_mask, "token_truncate", 2.0)
        sums.measures(lambda rows: ranks.append(rows) or rows)
    found = sums.measures(lambda rows: torch.cat(ranks))
    assert found == pytest.approx(measured(log_ratio, mask))


def test_the_recorder_follows_the_tokens_that_were_drawn():
    torch.manual_seed(0)
    recorder = correction.SampledLogProbs()
    chain = LogitsProcessorList([TopKLogitsWarper(top_k=3), recorder])
    ids = torch.tensor([[7], [7]])
    expected = []
    for _ in range(4):
        scores = chain(ids, torch.randn(2, 10))
        tokens = torch.multinomial(scores.softmax(-1), 1)
        expected.append(scores.log_softmax(-1).gather(1, tokens))
        ids = torch.cat([ids, tokens], dim=1)
    expected = torch.cat(expected, dim=1)
    rows = recorder.rows([ids[0, 1:].tolist(), ids[1, 1:3].tolist()])
    assert [len(row) for row in rows] == [4, 2]
    torch.testing.assert_close(torch.tensor(rows[0]), expected[0])
    torch.testing.assert_close(torch.tensor(rows[1]), expected[1, :2])
    with pytest.raises(RuntimeError, match="0 sampled positions are recorded for 1 completions"):
        correction.SampledLogProbs().rows([[3, 4]])


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"temperature": 1.4}, {"top_k": 5}, {"top_p": 0.6}], ids=str)
def test_recorded_probabilities_are_those_of_the_distribution_sampled_from(build, options):
    trainer = build(aqn=False, **options)
    batch = rollout(trainer)
    real = batch["completion_mask"].bool()
    trained = log_probs(trainer, batch)
    sampled = batch[SAMPLED]
    if "temperature" in options:
        assert torch.allclose(sampled[real], trained[real], atol=1e-5)
    else:  # what is left of the distribution sums to one, so that each of its tokens is more likely
        assert (sampled[real] > trained[real] + 0.1).all()
        weighted = seen_by_loss(trainer, batch)["advantages"]
        expected = batch["advantages"].unsqueeze(1) * (trained - sampled).exp()
        assert torch.allclose(weighted[real], expected[real], atol=1e-4)
        assert weighted.abs().max() > 0.01


def test_evaluation_is_neither_recorded_nor_weighted(build):
    trainer = build(**NOISY)
    trainer.model.eval()
    rows = [dict(row) for row in trainer.train_dataset.select(range(2)) for _ in range(4)]
    batch = trainer._generate_and_score_completions(rows)
    assert SAMPLED not in batch
    assert seen_by_loss(trainer, batch)["advantages"].dim() == 1


def test_without_correction_the_mismatch_is_measured_and_left(build):
    trainer = build(**NOISY, rollout_correction="none", max_steps=2)
    assert seen_by_loss(trainer, rollout(trainer))["advantages"].dim() == 1
    trainer.state.global_step = 0
    trainer.train()
    divergences = logged(trainer, "sampling/kl")
    assert list(divergences) == [1, 2]
    assert all(kl > 0 for kl in divergences.values())


def test_a_batch_trained_on_twice_keeps_its_weights(build):
    """`num_iterations`: TRL keeps the log-probabilities of before the first update, and so do the weights."""
    trainer = build(**NOISY, num_iterations=2, learning_rate=1e-2, max_steps=2)
    batches = []
    compute_loss = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: batches.append(dict(inputs)) or compute_loss(model, inputs)
    trainer.train()
    first, second = batches
    assert first["advantages"].dim() == 2
    assert torch.equal(first["advantages"], second["advantages"])
    ratio = (first["old_per_token_logps"] - first[SAMPLED]).exp().clamp(max=2.0)
    weighted = first["completion_mask"].bool() & (first["advantages"] != 0)
    scalar = (first["advantages"] / ratio)[weighted]
    assert len(scalar)
    assert len(scalar.round(decimals=3).unique()) <= 8


def test_a_loss_that_reads_advantages_before_they_are_weighted_fails(build):
    trainer = build(**NOISY)
    batch = rollout(trainer)
    trainer._compute_loss = lambda model, inputs: inputs["advantages"].sum()
    with pytest.raises(KeyError, match="advantages"):
        trainer.compute_loss(trainer.model, batch)


LOSSES = [
    (loss, level, mode)
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    for level in ("token", "sequence")
    for mode in CORRECTION_MODES
    if loss != "vespo" or (level == "token" and mode.startswith("token"))
]


def test_every_loss_is_weighted_as_trl_weights_it_under_vllm(build):
    """TRL multiplies each token's term by the ratio, behind a switch that only vLLM turns."""
    trainer = build(**NOISY, delta=4.0, off_policy_mask_threshold=0.05, beta=0.0)
    batch = rollout(trainer)
    # As if the policy had moved since: clipping takes part.
    torch.manual_seed(0)
    batch["old_per_token_logps"] = log_probs(trainer, batch) + 0.3 * torch.randn_like(batch[SAMPLED])
    mask = batch["completion_mask"]
    difference = (batch["old_per_token_logps"] - batch[SAMPLED]) * mask
    losses = {}
    for loss, level, mode in LOSSES:
        trainer.loss_type = trainer.args.loss_type = loss
        trainer.importance_sampling_level = level
        trainer.args.rollout_correction = mode
        trainer.args.rollout_correction_cap = 1.2
        ours = trainer.compute_loss(trainer.model, batch)
        logs = difference.sum(1, keepdim=True) if mode.startswith("sequence") else difference
        ratio = logs.exp()
        if mode.endswith("mask"):
            ratio = ratio * (ratio <= 1.2)
        ratio = ratio.clamp(max=1.2) if mode.endswith("truncate") else ratio
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
        theirs = trainer._compute_loss(trainer.model, {**batch, "importance_sampling_ratio": ratio})
        trainer.use_vllm = False
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7), (loss, level, mode)
        losses[loss, level, mode] = ours.item()
    by_mode = [{losses["dapo", "token", mode]} for mode in CORRECTION_MODES]
    assert len(set.union(*by_mode)) == 4  # the modes differ here


POLICIES = {
    "qat": {},
    "packed": {"scheme": MXFP4RLConfig(mode="packed", preset="w4a16"), "lora": True, **MEASURED},
    # Of dense copies: on codes one sum that is rounded otherwise moves an activation over an edge of the grid.
    "experts": {"experts": True, "router_replay": True, "step_weights": "dense", **MEASURED},
}


@pytest.mark.parametrize("name", POLICIES)
def test_rollout_and_training_agree_to_rounding_without_noise(build, tmp_path, name):
    """To 1e-5 nats in float32; in bfloat16: `test_lora_grpo.py`."""
    options = dict(POLICIES[name])
    if options.pop("lora", False):
        options["peft_config"] = LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    if options.pop("experts", False):
        options["policy"] = mixture(tmp_path / "moe")
    trainer = build(
        aqn=False, max_steps=2, per_device_train_batch_size=32, dataset=prompts(16), learning_rate=1e-2, **options
    )
    trainer.train()
    assert len(logged(trainer, "sampling/kl")) == 2
    assert max(logged(trainer, "sampling/sampling_logp_difference/max").values()) < 1e-5
    assert min(logged(trainer, "sampling/effective_sample_size_sequence").values()) > 1 - 1e-5


def test_measures_span_the_batches_of_a_step(build):
    """Two accumulated halves give what the whole batch gives."""
    trainer = build(**NOISY)
    batch = rollout(trainer)
    trainer.compute_loss(trainer.model, batch)
    whole = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith("sampling/")}
    trainer._metrics["train"].clear()
    for rows, last in ((slice(0, 4), False), (slice(4, 8), True)):
        trainer.accelerator.gradient_state._set_sync_gradients(last)
        half = {name: value[rows] if value.dim() else value for name, value in batch.items()}
        trainer.compute_loss(trainer.model, half)
    for name, value in whole.items():
        (found,) = trainer._metrics["train"][name]
        assert found == pytest.approx(value, rel=1e-5, abs=1e-9), name


def test_under_vllm_trl_weights_and_what_it_does_not_measure_is_added(build):
    trainer = build(**NOISY)
    batch = rollout(trainer)
    batch["old_per_token_logps"] = log_probs(trainer, batch)
    batch["importance_sampling_ratio"] = torch.ones_like(batch[SAMPLED])
    trainer._metrics["train"].clear()
    trainer.use_vllm = trainer.args.use_vllm = trainer.vllm_importance_sampling_correction = True
    assert seen_by_loss(trainer, batch)["advantages"].dim() == 1
    added = {name.removeprefix("sampling/") for name in trainer._metrics["train"] if name.startswith("sampling/")}
    sizes = {f"effective_sample_size{of}" for of in ("", "_sequence", "_weights")}
    assert added == {"kl", "importance_sampling_ratio/clipped", *sizes}


def judged(build, caplog, shift, **options):
    """Warnings of two steps on a rollout whose log-probabilities are ``shift`` off [8, T]."""
    trainer = build(aqn=False, **options)
    batch = rollout(trainer)
    batch[SAMPLED] = log_probs(trainer, batch) - shift
    trainer.correction.check(batch, 0)
    caplog.clear()
    for step in (1, 2):
        trainer.state.global_step = step
        trainer.compute_loss(trainer.model, dict(batch))
    return [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize(
    ("mode", "first", "others", "is_warned_of"),
    [
        ("sequence_mask", 0.0, 9.0, True),  # seven of eight are beyond the cap
        ("sequence_mask", 0.0, 0.0, False),
        ("token_truncate", 0.0, -9.0, True),
        ("token_truncate", 9.0, 9.0, False),  # all weights are the cap
    ],
)
def test_weights_that_leave_little_to_learn_from_are_warned_of_once(build, caplog, mode, first, others, is_warned_of):
    shift = torch.full((8, 1), others)
    shift[0] = first
    found = judged(build, caplog, shift, rollout_correction=mode)
    assert len(found) == is_warned_of
    assert all(f"step 1: the importance weights ({mode})" in text for text in found)
    assert judged(build, caplog, shift, rollout_correction="none") == []
