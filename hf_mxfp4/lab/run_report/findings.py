# SPDX-License-Identifier: Apache-2.0
"""Checks of a training run that take more than one logged quantity and its limits."""

from ...files import is_number
from ...rl import MOVEMENT_ALARM, movement_advice
from ...stats import difference_interval, means_with_interval, share_text
from .check import Check, graded
from .log import RunRecord
from .movement import logged_movements


#: Measured over intended noise may be off by this before it is pointed out, and before it is called absent.
_NOISE_OFF, _NOISE_ABSENT = 0.15, 0.5
#: Fall of an SQNR over the run, in dB, that is amber, and red.
_SQNR_FALL = (1.0, 3.0)
#: Movement of quantized weights over that of masters, below and above which, beyond two standard errors, it is amber.
_MOVEMENT = (0.5, 1.5)


def ending(record: RunRecord) -> Check:
    """Say how the run ended, or that no end is recorded."""
    title, of = "Course", f" of {record.max_steps}" if record.max_steps else ""
    resumed = _resumed_words(len(record.starts) - 1)
    if record.end is None:
        return Check(
            "amber",
            title,
            f"No end is recorded: the run was killed, or still goes on. Last known step: {record.step}{of}{resumed}.",
            "If it is dead, continue with resume_from_checkpoint (needs save_strategy and save_steps).",
        )
    if record.end.get("error"):
        return Check(
            "red",
            title,
            f"Stopped at step {record.end['step']}{of}{resumed} by {record.end['error']}",
            "Mend the cause and continue with resume_from_checkpoint; the message on the console names the checkpoint.",
        )
    early = record.end["reason"] != "finished"
    return Check(
        "amber" if early else "green", title, f"{record.end['reason'].capitalize()} at step {record.step}{of}{resumed}."
    )


def _resumed_words(times: int) -> str:
    if times < 1:
        return ""
    return ", resumed once" if times == 1 else f", resumed {times} times"


def reward_words(record: RunRecord) -> str:
    """Say how the mean reward went, with the interval of its change; empty for fewer than 6 values."""
    found = means_with_interval(record.values("reward"))
    if found is None:
        return ""
    first, last, half = found
    return f"Mean reward went from {first:.3f} to {last:.3f} ({last - first:+.3f} ± {half:.3f}, 95 % interval)."


def reward(record: RunRecord) -> Check | None:
    """Whether the reward rose by more than chance explains; `None` where none was logged."""
    values = record.values("reward")
    if not values:
        return None
    found = means_with_interval(values)
    if found is None:
        return Check(
            "none", "Reward", f"{len(values)} values are too few to tell a trend.", "Log more often: logging_steps."
        )
    first, last, half = found
    words = reward_words(record) + " First against last fifth of the logged values."
    if last - first > half:
        return Check("green", "Reward", words)
    if first - last > half:
        return Check("red", "Reward", words, "Training makes it worse: lower learning_rate or aqn_sigma_start.")
    advice = "No difference that chance could not explain: train longer, or look at the share of groups without signal."
    return Check("amber", "Reward", words, advice)


def accuracy(record: RunRecord) -> Check | None:
    """Whether held-out accuracy changed by more than its interval; `None` for fewer than two evaluations."""
    if len(record.evaluations) < 2:
        return None
    evaluations = sorted(record.evaluations, key=lambda evaluation: evaluation["step"])
    first, last = evaluations[0], evaluations[-1]
    name = next((name for name in first["scores"] if name in last["scores"]), None)
    if name is None:
        return None
    a, b = first["scores"][name], last["scores"][name]
    low, high = difference_interval(*((round(score["accuracy"] * score["n"]), score["n"]) for score in (a, b)))
    words = (
        f"{name}: {share_text(a['accuracy'], a['n'])} ({first['when']}) to {share_text(b['accuracy'], b['n'])} "
        f"({last['when']}), n = {b['n']}: {b['accuracy'] - a['accuracy']:+.3f} [{low:+.3f}, {high:+.3f}] "
        "(95 % intervals, one run)."
    )
    if low > 0:
        return Check("green", "Accuracy", words)
    if high < 0:
        return Check("red", "Accuracy", words, "The policy got worse on held-out problems.")
    return Check("amber", "Accuracy", words, "Not a difference: more test problems or more seeds would narrow it.")


def entropy(record: RunRecord) -> Check | None:
    """Whether the entropy of the policy collapsed or exploded; `None` where it was not logged."""
    values = record.values("entropy")
    if not values:
        return None
    alarms = [entry["entropy/alarm"] for entry in record.logs if is_number(entry.get("entropy/alarm"))]
    words = f"{values[0]:.3f} to {values[-1]:.3f} nats per token"
    slopes = record.values("entropy/slope")
    words += f", slope {slopes[-1]:+.2g} per step at the end" if slopes else ""
    if not any(alarms):
        return Check("green", "Entropy", f"{words}; no alarm.")
    kinds = {-1: "collapse", 1: "explosion"}
    found = ", ".join(
        f"{kind} in {alarms.count(sign)} of {len(alarms)} values" for sign, kind in kinds.items() if sign in alarms
    )
    advice = (
        "The policy stopped exploring: raise aqn_sigma_start or entropy_coef, or lower learning_rate."
        if [alarm for alarm in alarms if alarm][-1] < 0
        else "The policy is losing its shape: lower aqn_sigma_start or learning_rate."
    )
    return Check("red" if alarms[-1] else "amber", "Entropy", f"{words}; alarms: {found}.", advice)


def noise(record: RunRecord) -> Check | None:
    """Whether adaptive quantization noise was measured as it was intended; `None` where the log does not say."""
    sigmas, stds = record.values("aqn/sigma"), record.values("aqn/measured_std")
    if not sigmas or not stds:
        off = record.facts.get("options", {}).get("aqn") is False
        return Check("none", "Noise", "Adaptive quantization noise is off (aqn: false).") if off else None
    intended, real = sum(sigmas) / len(sigmas), sum(stds) / len(stds)
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


def layers(record: RunRecord) -> Check | None:
    """Say how many layers are quantized; `None` where the log does not say."""
    facts = record.facts
    if not is_number(facts.get("n_quantized")):
        return None
    if facts["n_quantized"] == 0:
        return Check("none", "Quantization", "No layer is quantized: this is a run in full precision.")
    skipped = (
        f"{facts['n_skipped']} left in full precision" if is_number(facts.get("n_skipped")) else "others left alone"
    )
    names = f" ({', '.join(facts['skipped'])})" if 0 < len(facts.get("skipped") or []) <= 4 else ""
    sqnr = f"; weight SQNR {facts['weight_sqnr_db']:.1f} dB at the start" if is_number(facts["weight_sqnr_db"]) else ""
    return Check("green", "Quantization", f"{facts['n_quantized']} layers in MXFP4, {skipped}{names}{sqnr}.")


def sqnr(record: RunRecord) -> Check | None:
    """Say how far the signal to quantization noise ratio fell over the run; `None` where it was not logged."""
    falls, words = [], []
    for key, name in (("error/sqnr_db", "weights"), ("error/activations/sqnr_db", "activations")):
        values = record.values(key)
        if values:
            falls.append(values[0] - values[-1])
            words.append(f"{name} {values[0]:.1f} to {values[-1]:.1f} dB")
    if not falls:
        return None
    advice = "Outliers grow: outlier_fallback or macro_block hold the error down; a lower learning_rate slows it."
    return graded("Quantization error", f"SQNR of {', '.join(words)}.", max(falls), _SQNR_FALL, advice)


def movement(record: RunRecord) -> Check | None:
    """Whether steps move quantized weights as far as their masters; `None` where it was not measured."""
    found = logged_movements(record)
    if not found:
        return None
    few, many = _MOVEMENT
    highest = max(found, key=lambda movement: movement.total - movement.interval)
    shown = ", ".join(dict.fromkeys(str(movement) for movement in (found[0], highest, found[-1])))
    words = f"Quantized weights moved {shown} times as far as their masters, where training assumes 1."
    least = highest.total - highest.interval
    if least > many:
        words += f" Most in {highest.worst}." if highest.kinds else ""
        state = "red" if least > MOVEMENT_ALARM else "amber"
        return Check(state, "Step movement", words, movement_advice(is_first=highest is found[0]))
    if min(movement.total + movement.interval for movement in found) < few:
        advice = (
            "Masters near their quantized values, as those of a checkpoint that was quantized before, have to go half "
            "the way to the next value before a step shows."
        )
        return Check("amber", "Step movement", words, advice)
    return Check("green", "Step movement", words)


def finite(record: RunRecord) -> Check | None:
    """Whether loss and gradient norm stayed finite; `None` where no loss was logged."""
    watched = ("loss", "grad_norm")
    bad = [entry["step"] for entry in record.logs if any(k in entry and not is_number(entry[k]) for k in watched)]
    if bad:
        words = f"loss or grad_norm was NaN or infinite in {len(bad)} logged steps, first at step {bad[0]}."
        return Check("red", "Finite numbers", words, "Lower learning_rate; check the rewards for NaN.")
    return Check("green", "Finite numbers", "Loss and gradient norm stayed finite.") if record.values("loss") else None
