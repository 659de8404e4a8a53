# SPDX-License-Identifier: Apache-2.0
"""Checks of a training run's health from its logged numbers, in plain words with a line of advice each.

The limits are rules of thumb: a report says "look", it does not stop anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ...rl.run_log import MOVEMENT_ALARM, movement_advice
from ...utils import share_text
from ..evaluation.intervals import paired_share_difference, welch_interval
from .log import RunRecord, is_number


#: What a report calls the states, from worst to best; "none": there is nothing to judge.
STATE_WORDS = {"red": "BAD", "amber": "LOOK", "green": "OK", "none": "–"}
#: Measured over intended noise may be off by this before it is pointed out.
_NOISE_OFF = 0.15
#: Below this share of the intended noise it is called absent.
_NOISE_ABSENT = 0.5
#: Fall of an SQNR over the run, in dB, that is amber, and red.
_SQNR_FALL = (1.0, 3.0)
#: Relative change of a held-out KL that counts as one.
_KL_MOVED = 0.05
#: Movement of quantized weights over that of masters, below and above which, beyond two standard errors, it is amber.
_MOVEMENT = (0.5, 1.5)


@dataclass(frozen=True)
class Check:
    """One finding: its state (see [`STATE_WORDS`]), what was looked at, what was found, and what to do about it."""

    state: str
    title: str
    finding: str
    advice: str = ""


@dataclass(frozen=True)
class Rule:
    """A check of one logged quantity against two limits.

    Attributes:
        metric: its name in the log; without values the check is left out.
        limits: of the mean, where it is amber and where red; falling ones for a quantity that should be high.
        finding: a format of the words, with ``mean`` and ``max`` of the values.
    """

    title: str
    metric: str
    limits: tuple[float, float]
    finding: str
    advice: str

    def __call__(self, record: RunRecord) -> Check | None:
        values = record.values(self.metric)
        if not values:
            return None
        words = self.finding.format(mean=fmean(values), max=max(values))
        return graded(self.title, words, fmean(values), self.limits, self.advice)


def graded(title: str, finding: str, value: float, limits: tuple[float, float], advice: str) -> Check:
    """Return a check that is amber from the first limit on and red from the second; limits that fall are reached from
    above. Advice is given unless it is green."""
    amber, red = limits
    if amber > red:
        value = -value
        amber = -amber
        red = -red
    if value >= red:
        return Check("red", title, finding, advice)
    if value >= amber:
        return Check("amber", title, finding, advice)
    return Check("green", title, finding)


def _of_max_steps(record: RunRecord) -> str:
    """Return " of 100" where it is known how many steps a run was to take."""
    if not record.max_steps:
        return ""
    return f" of {record.max_steps}"


def _ending(record: RunRecord) -> Check:
    """Check whether and how a run ended."""
    title = "Course"
    of = _of_max_steps(record)
    times = len(record.starts) - 1
    resumed = ""
    if times == 1:
        resumed = ", resumed once"
    elif times > 1:
        resumed = f", resumed {times} times"
    if record.end is None:
        return Check(
            "amber",
            title,
            f"No end is recorded: the run was killed or is still running. Last step: {record.step}{of}{resumed}.",
            "If it is dead, continue with resume_from_checkpoint (needs save_strategy and save_steps).",
        )
    if record.end.get("error"):
        return Check(
            "red",
            title,
            f"Stopped at step {record.end['step']}{of}{resumed} by {record.end['error']}",
            "Fix the cause and continue with resume_from_checkpoint; the message on the console names the checkpoint.",
        )
    reason = record.end["reason"]
    state = "green" if reason == "finished" else "amber"
    return Check(state, title, f"{reason.capitalize()} at step {record.step}{of}{resumed}.")


def _reward_change(values: Sequence[float]) -> tuple[float, float, tuple[float, float]] | None:
    """Return the mean of the first and of the last fifth of ``values`` (three at least), and the interval of their
    difference; `None` for fewer than 6 values."""
    if len(values) < 6:
        return None
    width = max(3, len(values) // 5)
    first = values[:width]
    last = values[-width:]
    return fmean(first), fmean(last), welch_interval(first, last)["interval"]


def _reward_words(record: RunRecord) -> str:
    """Return the change of the reward in a sentence; nothing where there are too few values."""
    found = _reward_change(record.values("reward"))
    if found is None:
        return ""
    first, last, (low, high) = found
    change = f"{last - first:+.3f} [{low:+.3f}, {high:+.3f}], 95 % interval as if steps were independent"
    return f"Mean reward went from {first:.3f} to {last:.3f} ({change})."


def _reward(record: RunRecord) -> Check | None:
    """Check whether the reward rose by more than chance."""
    values = record.values("reward")
    if not values:
        return None
    change = _reward_change(values)
    if change is None:
        words = f"{len(values)} values are too few to tell a trend."
        return Check("none", "Reward", words, "Log more often: logging_steps.")
    _, _, (low, high) = change
    words = _reward_words(record) + " First against last fifth of the logged values."
    if low > 0:
        return Check("green", "Reward", words)
    if high < 0:
        return Check("red", "Reward", words, "Training makes it worse: lower learning_rate or aqn_sigma_start.")
    advice = "No difference that chance could not explain: train longer, or look at the share of groups without signal."
    return Check("amber", "Reward", words, advice)


def _accuracy(record: RunRecord) -> Check | None:
    """Check whether the last evaluation is better than the first on the same problems, in the first score that both
    have."""
    if len(record.evaluations) < 2:
        return None
    evaluations = sorted(record.evaluations, key=lambda evaluation: evaluation["step"])
    first = evaluations[0]
    last = evaluations[-1]
    name = next((name for name in first["scores"] if name in last["scores"]), None)
    if name is None:
        return None
    before = first["scores"][name]
    after = last["scores"][name]
    if len(before) != len(after):
        return Check("none", "Accuracy", f"{first['when']} and {last['when']} have different problems.")
    change, _, _ = paired_share_difference(after, before)
    words = (
        f"{name}: {share_text(fmean(before), len(before))} ({first['when']}) to "
        f"{share_text(fmean(after), len(after))} ({last['when']}), n = {len(after)}: "
        f"{change.signed()} (95 % intervals, one run)."
    )
    if change.low > 0:
        return Check("green", "Accuracy", words)
    if change.high < 0:
        return Check("red", "Accuracy", words, "The policy got worse on held-out problems.")
    return Check("amber", "Accuracy", words, "Not a difference: more test problems or more seeds would narrow it.")


def _held_out(record: RunRecord) -> Check | None:
    """Compare the KL of held-out texts after distillation with that before it."""
    title = "Held-out KL"
    suffix = "_kl"
    logged = {key for entry in record.logs for key in entry}
    # GRPO logs an eval_kl of another kind, and no teacher's perplexity.
    kls = [key for key in sorted(logged) if f"{key.removesuffix(suffix)}_teacher_perplexity" in logged]
    words = []
    ratios = []
    for key in kls:
        values = [entry[key] for entry in record.logs if key in entry]
        before = values[0]
        after = values[-1]
        name = key.removeprefix("eval").removesuffix(suffix).removeprefix("_") or "held-out text"
        if not is_number(before) or not is_number(after):
            return Check("red", title, f"{name}: NaN or infinite.", "Lower learning_rate.")
        if len(values) > 1 and before > 0:
            words.append(f"{name} {before:.3g} to {after:.3g}")
            ratios.append(after / before)
    if not ratios:
        return None
    finding = f"{', '.join(words)} nats per token."
    rises = [ratio > 1 + _KL_MOVED for ratio in ratios]
    if all(rises):
        advice = "Distillation made the student worse: lower learning_rate, and leave dither_ties on."
        return Check("red", title, finding, advice)
    if any(rises):
        return Check("amber", title, finding, "A rise is forgetting: learn texts like these too.")
    if min(ratios) > 1 - _KL_MOVED:
        return Check("amber", title, finding, "Nothing was gained: train longer, or change learning_rate.")
    return Check("green", title, finding)


def _entropy(record: RunRecord) -> Check | None:
    """Check for alarms of [`hf_mxfp4.rl.callbacks.entropy.EntropyCallback`]: 1 for an explosion, -1 for a collapse."""
    values = record.values("entropy")
    if not values:
        return None
    alarms = record.values("entropy/alarm")
    words = f"{values[0]:.3f} to {values[-1]:.3f} nats per token"
    slopes = record.values("entropy/slope")
    if slopes:
        words += f", slope {slopes[-1]:+.2g} per step at the end"
    if not any(alarms):
        return Check("green", "Entropy", f"{words}; no alarm.")
    counts = []
    for sign, kind in ((-1, "collapse"), (1, "explosion")):
        if sign in alarms:
            counts.append(f"{kind} in {alarms.count(sign)} of {len(alarms)} values")
    last_alarm = [alarm for alarm in alarms if alarm][-1]
    advice = "The policy is losing its shape: lower aqn_sigma_start or learning_rate."
    if last_alarm < 0:
        advice = "The policy stopped exploring: raise aqn_sigma_start or entropy_coef, or lower learning_rate."
    state = "red" if alarms[-1] else "amber"
    return Check(state, "Entropy", f"{words}; alarms: {', '.join(counts)}.", advice)


def _noise(record: RunRecord) -> Check | None:
    """Check whether the noise on norms had the standard deviation that was intended."""
    sigmas = record.values("aqn/sigma")
    stds = record.values("aqn/measured_std")
    if not sigmas or not stds:
        if record.facts.get("options", {}).get("aqn") is False:
            return Check("none", "Noise", "Adaptive quantization noise is off (aqn: false).")
        return None
    intended = fmean(sigmas)
    real = fmean(stds)
    if intended == 0:
        advice = "The first of aqn_num_stages stages is noise-free; nothing is wrong if the run ended in it."
        return Check("none", "Noise", "No noise on norms was intended so far.", advice)
    modules = max(record.values("aqn/n_modules"), default=0)
    words = (
        f"Noise was on: intended {max(sigmas):.2g} at most, {intended:.2g} on average; measured {real:.2g} on average "
        f"({real / intended:.0%} of it) on {modules:.0f} norms."
    )
    if real < _NOISE_ABSENT * intended or modules == 0:
        return Check("red", "Noise", words, "The noise did not reach the policy that samples.")
    if abs(real / intended - 1) > _NOISE_OFF:
        advice = "It differs from what was set: models of few weights draw few numbers; else look."
        return Check("amber", "Noise", words, advice)
    return Check("green", "Noise", words)


def _layers(record: RunRecord) -> Check | None:
    """Say how many layers are quantized."""
    facts = record.facts
    if not is_number(facts.get("n_quantized")):
        return None
    if facts["n_quantized"] == 0:
        return Check("none", "Quantization", "No layer is quantized: this is a run in full precision.")
    n_skipped = facts.get("n_skipped")
    skipped = "others left alone"
    if is_number(n_skipped):
        skipped = f"{n_skipped} left in full precision"
    names = ""
    if 0 < len(facts.get("skipped") or []) <= 4:
        names = f" ({', '.join(facts['skipped'])})"
    sqnr_db = facts.get("weight_sqnr_db")
    sqnr = ""
    if is_number(sqnr_db):
        sqnr = f"; weight SQNR {sqnr_db:.1f} dB at the start"
    return Check("green", "Quantization", f"{facts['n_quantized']} layers in MXFP4, {skipped}{names}{sqnr}.")


def _sqnr(record: RunRecord) -> Check | None:
    """Check whether quantization errors grew over the run."""
    falls = []
    words = []
    for key, name in (("error/sqnr_db", "weights"), ("error/activations/sqnr_db", "activations")):
        values = record.values(key)
        if values:
            falls.append(values[0] - values[-1])
            words.append(f"{name} {values[0]:.1f} to {values[-1]:.1f} dB")
    if not falls:
        return None
    advice = "Outliers grow: outlier_fallback or macro_block hold the error down; a lower learning_rate slows it."
    return graded("Quantization error", f"SQNR of {', '.join(words)}.", max(falls), _SQNR_FALL, advice)


def _lengths(record: RunRecord) -> Check | None:
    """Check how many completions ran into their limit in the last fifth of the run."""
    clipped = record.values("completions/clipped_ratio")
    lengths = record.values("completions/mean_length")
    if not clipped or not lengths:
        return None
    last_fifth = max(1, len(clipped) // 5)
    share = fmean(clipped[-last_fifth:])
    words = f"{lengths[0]:.0f} to {lengths[-1]:.0f} tokens on average; {share:.0%} cut off in the last fifth."
    advice = "Raise max_completion_length, or reward shorter answers."
    return graded("Response length", words, share, (0.3, 0.8), advice)


def _movement(record: RunRecord) -> Check | None:
    """Check whether quantized weights move as far as their masters."""
    movements = record.movements()
    if not movements:
        return None
    few, many = _MOVEMENT
    highest = max(movements, key=lambda movement: movement[1] - movement[2])
    shown = []
    for step, total, error in dict.fromkeys((movements[0], highest, movements[-1])):
        shown.append(f"{total:.3g} ± {error:.2g} (step {step})")
    words = f"Quantized weights moved {', '.join(shown)} times as far as their masters, where training assumes 1."
    least = highest[1] - highest[2]
    if least > many:
        state = "red" if least > MOVEMENT_ALARM else "amber"
        return Check(state, "Step movement", words, movement_advice(is_first=highest is movements[0]))
    if min(total + error for _, total, error in movements) < few:
        advice = (
            "Masters near their quantized values, as those of a checkpoint that was quantized before, have to go half "
            "the way to the next value before a step shows."
        )
        return Check("amber", "Step movement", words, advice)
    return Check("green", "Step movement", words)


def _finite(record: RunRecord) -> Check | None:
    """Check that losses and gradients are numbers."""
    bad = []
    for entry in record.logs:
        if not all(is_number(entry.get(name, 0.0)) for name in ("loss", "grad_norm")):
            bad.append(entry["step"])
    if bad:
        words = f"loss or grad_norm was NaN or infinite in {len(bad)} logged steps, first at step {bad[0]}."
        return Check("red", "Finite numbers", words, "Lower learning_rate; check the rewards for NaN.")
    if not record.values("loss"):
        return None
    return Check("green", "Finite numbers", "Loss and gradient norm stayed finite.")


#: In the order of importance.
CHECKS: tuple[Callable[[RunRecord], Check | None], ...] = (
    _ending,
    _reward,
    _accuracy,
    _held_out,
    _entropy,
    _noise,
    _layers,
    _sqnr,
    Rule(
        "Importance weights",
        "sampling/importance_sampling_ratio/clipped",
        (0.01, 0.10),
        "{mean:.2%} of the importance weights were clipped on average, {max:.2%} at most.",
        "Rollouts are far from the policy that trains: lower aqn_sigma_start, or reuse rollouts less.",
    ),
    Rule(
        "Effective sample size",
        "sampling/effective_sample_size",
        (0.7, 0.3),
        "{mean:.1%} on average.",
        "Few tokens carry the gradient: lower aqn_sigma_start, or reuse rollouts less.",
    ),
    Rule(
        "Learning signal",
        "frac_reward_zero_std",
        (0.5, 0.9),
        "In {mean:.0%} of the groups all responses got the same reward, and taught nothing.",
        "Choose prompts the policy solves sometimes, or raise num_generations or temperature.",
    ),
    _lengths,
    _movement,
    _finite,
)


def health_checks(record: RunRecord) -> list[Check]:
    """Return all checks of a run, in the order of importance; those whose quantities were not logged are left out."""
    checks = [check(record) for check in CHECKS]
    return [check for check in checks if check is not None]


def overall(checks: Sequence[Check]) -> str:
    """Return the worst state of the checks."""
    order = list(STATE_WORDS)
    return min((check.state for check in checks if check.state != "none"), key=order.index, default="none")


def summary(record: RunRecord, checks: Sequence[Check]) -> str:
    """Return the run in one or two sentences."""
    words = {"red": "is not healthy", "amber": "needs a look", "green": "looks healthy", "none": "cannot be judged"}
    reasons = []
    for state in ("red", "amber"):
        count = sum(check.state == state for check in checks)
        if count:
            reasons.append(f"{count} {STATE_WORDS[state]}")
    because = ""
    if reasons:
        because = f" ({', '.join(reasons)})"
    steps = f"{record.step}{_of_max_steps(record)} steps"
    return f"This run {words[overall(checks)]}{because}: {steps}. {_reward_words(record)}".strip()
