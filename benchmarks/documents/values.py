# SPDX-License-Identifier: Apache-2.0
"""Single numbers in the sentences of documents, from the records."""

from collections.abc import Callable
from statistics import fmean, median

from hf_mxfp4.lab.evaluation.intervals import t_interval, welch_interval, with_interval
from hf_mxfp4.recipes.ablations.results import mean_logged

from ..records import records
from .evidence import AS_IT_IS, SMOOTHED, kl_cell, results_by_text
from .runs import runs_at_the_best_rate, runs_of


def _minus(
    other: str, cell: str, key: str = "value", grid: str = "recovery_two_points", seeds: range | None = None
) -> str:
    """Return accuracy points of a cell minus another's, with the 95 % interval and the number of runs, of all seeds or
    of these."""
    values, others = (
        [run[key] for run in runs_of(name, grid) if seeds is None or run["seed"] in seeds] for name in (cell, other)
    )
    counted = "1 run" if len(values) == 1 else f"{len(values)} runs"
    return f"{with_interval(welch_interval(others, values), 100, 1, alone='')} ({counted})"


def _effect_of_noise(cell: str) -> str:
    """Return by how much AQN changes the accuracy of a cell, and its reward and entropy (means over training), with
    95 % intervals."""
    clean = runs_of(cell)
    noisy = runs_of(f"{cell}_aqn")
    accuracy = welch_interval([run["value"] for run in clean], [run["value"] for run in noisy])
    told = [f"accuracy {with_interval(accuracy, 100, 1)} points"]
    for name, unit, digits in (("reward", "", 4), ("entropy", " nats", 3)):
        means = [[mean_logged([run["curves"]], name) for run in runs] for runs in (clean, noisy)]
        told.append(f"{name} {with_interval(welch_interval(*means), 1, digits)}{unit}")
    return f"{', '.join(told)} ({len(noisy)} and {len(clean)} runs)"


def _distillation(cell: str, grid: str) -> str:
    """Return the divergence from the teacher before and after the distillation of a cell, in nats: the mean over its
    students, with the lowest and the highest after it."""
    students = [run["distilled"] for run in runs_of(cell, grid)]
    before, after = ([student[name] for student in students] for name in ("kl_before", "kl_after"))
    return (
        f"{fmean(before):.3f} to {fmean(after):.3f} ({min(after):.3f} to {max(after):.3f} in {len(students)} students)"
    )


def _range(file: str, value: Callable[[dict], float], form: str = ".0f", of: str = "") -> str:
    """Return the lowest and the highest of a value of the records of a file whose names end so."""
    values = [value(record) for record in records(file) if record["name"].endswith(of)]
    return f"{min(values):{form}} to {max(values):{form}}"


def _smoothing_of_the_paper() -> str:
    """Return the KL of the paper's MBS + OF on GSM8K, on the checkpoint as it is and smoothed."""
    on_gsm8k = results_by_text()["gsm8k/test.jsonl"]
    return " to ".join(kl_cell(on_gsm8k[variant, "rceil+mbs128-static+of0.5"]) for variant in (AS_IT_IS, SMOOTHED))


def _named(file: str, name: str) -> dict:
    """Return the first record of a name."""
    return next(record for record in records(file) if record["name"] == name)


def _number(file: str, key: str, form: str, *names: str) -> str:
    """Return a field of the first record of each name."""
    return " and ".join(f"{_named(file, name)[key]:{form}}" for name in names)


def _loss_above(arm: str, other: str) -> str:
    """Return how much more loss an arm of the pretraining study costs than another, with the 95 % interval over the
    seeds that both have: of one seed, both are measured against the same baseline."""
    gaps = {
        record["name"]: dict(zip(record["seeds"], record["gap"]["by_seed"], strict=True))
        for record in records("pretrain")
    }
    both = gaps[arm].keys() & gaps[other].keys()
    differences = [gaps[arm][seed] - gaps[other][seed] for seed in both]
    return f"{with_interval(t_interval(differences), 1, 3)} ({len(both)} seeds)"


def _median_and_range(seconds: list[float], form: str = ".0f") -> str:
    """Return the median of times, with the lowest and the highest."""
    return f"{median(seconds):{form}} s ({min(seconds):{form}} to {max(seconds):{form}})"


def _seconds_of_runs(cell: str) -> str:
    """Return the time of RL runs of a cell on an H100."""
    return _median_and_range([record["seconds"] for record in runs_at_the_best_rate() if record["cell"] == cell])


def _seconds_of_loads(way: str) -> str:
    """Return the time in which a process loads SmolLM2 for the first time."""
    return _median_and_range(_named("loading", f"SmolLM2-135M-Instruct / first load / {way}")["samples"], ".1f")


def _bf16_timings(file: str, name: str) -> list[float]:
    """Return the seconds of BF16 in every record of the shape of this one: it was timed anew for each scheme."""
    shape = _named(file, name)["shape"]
    return [record["peers"]["BF16"]["seconds"] for record in records(file) if record["shape"] == shape]


def _speed(file: str, name: str) -> str:
    """Return the speed of a layer over that of BF16, by the slowest and the fastest timing of BF16."""
    timings = _bf16_timings(file, name)
    ours = _named(file, name)["seconds"]
    return f"{min(timings) / ours:.2f} to {max(timings) / ours:.2f}"


def _spread_of_bf16(file: str, name: str) -> str:
    """Return the lowest and the highest of the timings of BF16."""
    timings = _bf16_timings(file, name)
    return f"{1e3 * min(timings):.1f} to {1e3 * max(timings):.1f} ms in {len(timings)} timings"


#: By the names of markers.
VALUES: dict[str, Callable[[], str]] = {
    "smoothed_end": lambda: _minus("bf16", "w4a8_smoothed"),
    "smoothed_curve": lambda: _minus("bf16", "w4a8_smoothed", "mean_of_curve"),
    "gptq_end": lambda: _minus("bf16", "bf16_then_gptq"),
    "sampled_end": lambda: _minus("bf16", "bf16_sampled_w4a8"),
    "distilled_end": lambda: _minus("bf16", "w4a8_distilled"),
    "paper_smoothed_end": lambda: _minus("bf16", "paper_a_smoothed"),
    "distilled_declared": lambda: _minus("bf16", "w4a8_distilled", seeds=range(12)),
    "distilled_curve": lambda: _minus("bf16", "w4a8_distilled", "mean_of_curve"),
    "steps_end": lambda: _minus("bf16", "w4a8_smoothed", grid="recovery_steps"),
    "steps_curve": lambda: _minus("bf16", "w4a8_smoothed", "mean_of_curve", "recovery_steps"),
    "steps_distilled_end": lambda: _minus("bf16", "w4a8_distilled", grid="recovery_steps"),
    "steps_distilled_curve": lambda: _minus("bf16", "w4a8_distilled", "mean_of_curve", "recovery_steps"),
    "gemma_end": lambda: _minus("bf16", "w4a8_smoothed", grid="recovery_gemma"),
    "gemma_tuned_end": lambda: _minus("bf16", "w4a8_distilled_tuned", grid="recovery_gemma"),
    "gemma_distilled_end": lambda: _minus("bf16", "w4a8_distilled", grid="recovery_gemma"),
    "students": lambda: _distillation("w4a8_distilled", "recovery_two_points"),
    "students_w4a4": lambda: _distillation("w4a4_h64_distilled", "recovery_two_points"),
    "students_lora": lambda: _distillation("w4a16_lora_distilled", "recovery_two_points"),
    "gemma_distillation": lambda: _distillation("w4a8_distilled", "recovery_gemma"),
    "lora_end": lambda: _minus("bf16_lora", "w4a8_lora"),
    "lora_gptq_end": lambda: _minus("bf16_lora", "w4a8_lora_gptq"),
    "lora_smoothed_end": lambda: _minus("bf16_lora", "w4a8_lora_smoothed"),
    "lora_w4a16_end": lambda: _minus("bf16_lora", "w4a16_lora"),
    "lora_w4a16_distilled_end": lambda: _minus("bf16_lora", "w4a16_lora_distilled"),
    "lora_w4a16_gptq_end": lambda: _minus("bf16_lora", "w4a16_lora_gptq"),
    "noise_paper": lambda: _effect_of_noise("paper_a"),
    "noise_w4a8": lambda: _effect_of_noise("w4a8_smoothed"),
    "gpu_bf16": lambda: _spread_of_bf16("gpu_linear", "linear / w4a8"),
    "gpu_forward": lambda: _speed("gpu_forward", "forward / w4a8"),
    "gpu_training": lambda: _speed("gpu_linear", "linear / w4a8"),
    "gpu_training_w4a8g8": lambda: _speed("gpu_linear", "linear / w4a8g8"),
    "gpu_decoding": lambda: _range("gpu_decode", lambda record: record["ratio"], ".1f"),
    "gpu_host": lambda: _range("gpu_decode", lambda record: 1e6 * record["host"], of="rows"),
    "gpu_host_bf16": lambda: _range("gpu_decode", lambda record: 1e6 * record["peers"]["BF16"]["host"], of="rows"),
    "gpu_quantize": lambda: _range("gpu_quantize", lambda record: 100 * record["ceiling_fraction"]),
    "gpu_generate": lambda: _number("gpu_generate", "ratio", ".2f", "generate / packed w4a16"),
    "gpu_generate_static": lambda: _number("gpu_generate", "ratio", ".2f", "generate / packed w4a16, static cache"),
    "loading_alone": lambda: _seconds_of_loads("neither"),
    "loading": lambda: _seconds_of_loads("dithered and smoothed"),
    "smoothed_paper": _smoothing_of_the_paper,
    "sqnr": lambda: _number("tensor_cores", "weight_sqnr_db", ".1f", "even+mbs128-blockwise_fp8", "even"),
    "architectures_right": lambda: str(sum(record["outcome"] == "right" for record in records("architectures"))),
    # Both of one command and commit.
    "rl_seconds_bf16": lambda: _seconds_of_runs("bf16_dithered"),
    "rl_seconds": lambda: _seconds_of_runs("w4a8"),
    "pretrain_backward": lambda: _loss_above("all", "fprop"),
    "pretrain_dgrad": lambda: _loss_above("fprop_dgrad", "fprop"),
    "pretrain_wgrad": lambda: _loss_above("all", "fprop_dgrad"),
    "pretrain_ours": lambda: _loss_above("ours", "all"),
}
