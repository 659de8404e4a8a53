# SPDX-License-Identifier: Apache-2.0
"""Tables of what runs gave and took: accuracy, time, memory, tokens; and of architectures."""

from collections import Counter
from statistics import fmean

from hf_mxfp4.recipes.ablations.results import error_of_mean, mean_cell, mean_logged, table_rows
from hf_mxfp4.recipes.common.reporting import markdown_table

from ..records import interval, records, table


def demo() -> str:
    """Return accuracies of the demo before and after RL, by seed."""
    rows = []
    for record in records("demo_cpu"):
        before = record["baseline"]
        after = record["value"]
        error_before, error_after = record["standard_error"]
        rows.append([record["name"][-1], f"{before:.3f} ± {error_before:.3f}", f"{after:.3f} ± {error_after:.3f}"])
    return table(["seed", "before RL", "after RL"], rows)


def memory() -> str:
    """Return megabytes of each part of a training step, by mode and checkpointing."""
    parts = ("weights", "gradients", "optimizer", "saved", "peak")
    rows = []
    for record in records("memory"):
        mode, checkpointing = record["name"].split(" / checkpointing ")
        rows.append([mode, checkpointing, *(f"{record['measured'][part] / 1e6:.0f}" for part in parts)])
    return table(["mode", "checkpointing", *parts], rows)


def pretrain() -> str:
    """Return what each arm of the pretraining study costs, next to the baseline in full precision."""
    rows = []
    for record in records("pretrain"):
        # The second is an arm that does not exist any more.
        if record["name"] in ("baseline", "all_oscireset"):
            continue
        overhead = record["overhead"]
        n_operands = sum(count > 0 for count in record["quantized_operands"].values())
        rows.append(
            [
                f"`{record['name']}`",
                str(n_operands),
                interval(overhead, 100, 1),
                str(overhead["n"]),
                interval(record["gap"], 1, 4),
                record["paper"] or "",
            ]
        )
    columns = ["arm", "quantized operands", "more tokens, %", "seeds", "loss above the baseline's"]
    return table([*columns, "paper: more tokens"], rows)


def architectures() -> str:
    """Return the architectures that are right by kind, and those that are not."""
    tried = records("architectures")
    outcomes = ("right", "refused", "wrong", "not tried")
    counts = Counter(record["outcome"] for record in tried)
    counted = ", ".join(f"{counts[outcome]} {outcome}" for outcome in outcomes)
    parts = [f"{len(tried)} architectures: {counted}.\n"]
    kinds: dict[str, list[str]] = {}
    for record in tried:
        if record["outcome"] == "right":
            kinds.setdefault(record["kind_of_model"], []).append(f"`{record['name']}`")
    for kind, names in kinds.items():
        parts.append(f"* {kind}: {' '.join(names)}")
    parts.append("")
    for outcome in ("refused", "wrong"):
        names = [f"`{record['name']}`" for record in tried if record["outcome"] == outcome]
        if names:
            parts.append(f"{outcome.capitalize()}: {' '.join(names)}\n")
    return "\n".join(parts)


#: Seeds that learning rates are chosen on, which are not reported.
TUNING_SEEDS = (100, 101)
#: End points of a run, as its record names them.
ENDS = ("value", "mean_of_curve")


def reported_runs(grid: str = "recovery_two_points") -> list[dict]:
    """Return the runs of a grid in `recipes/configs` that learning rates were not chosen on."""
    return [record for record in records(grid) if record["seed"] not in TUNING_SEEDS]


def runs_of(cell: str, grid: str = "recovery_two_points") -> list[dict]:
    """Return the reported runs of a cell."""
    return [run for run in reported_runs(grid) if run["cell"] == cell]


def two_points() -> str:
    """Return the table of RL with a declared protocol, with what ran where."""
    return _grid_table(reported_runs())


def steps() -> str:
    """Return the table of RL with answers of several steps."""
    return _grid_table(reported_runs("recovery_steps"))


def steps_mismatch() -> str:
    """Return KL(sampler, trainer) in nats by cell and position of the token, means over runs and steps."""
    by_label: dict[str, list[dict]] = {}
    for run in reported_runs("recovery_steps"):
        by_label.setdefault(run["label"], []).append(run["curves"])
    first, *_ = by_label.values()
    names = [name for name in first[0] if name.startswith("sampling/kl/")]
    rows = [[label, *(f"{mean_logged(curves, name):.2g}" for name in names)] for label, curves in by_label.items()]
    return table(["cell", *(name.removeprefix("sampling/kl/") for name in names)], rows)


def second_decoder() -> str:
    """Return the table of RL with Gemma 3 270M."""
    return _grid_table(reported_runs("recovery_gemma"))


def two_points_rates() -> str:
    """Return the end points of SmolLM2-135M at each learning rate."""
    return _rates("recovery_two_points")


def second_decoder_rates() -> str:
    """Return the end points of Gemma 3 270M at each learning rate."""
    return _rates("recovery_gemma")


def _rates(grid: str) -> str:
    """Return the two end points by cell and learning rate: means over the tuning seeds, ± their standard errors."""
    by_label: dict[str, dict[float, list[dict]]] = {}
    for record in records(grid):
        if record["seed"] in TUNING_SEEDS:
            by_label.setdefault(record["label"], {}).setdefault(record["learning_rate"], []).append(record)
    rates = sorted({rate for of_label in by_label.values() for rate in of_label})
    rows = []
    for label, of_label in by_label.items():
        cells = []
        for rate in rates:
            if rate not in of_label:
                cells.append("")
                continue
            found = of_label[rate]
            ends = []
            for end in ENDS:
                values = [record[end] for record in found]
                ends.append(mean_cell(fmean(values), error_of_mean(values)))
            cells.append(f"{' and '.join(ends)} ({len(found)})")
        rows.append([label, *cells])
    return table(["cell", *(f"{rate:.0e}" for rate in rates)], rows)


def runs_at_the_best_rate() -> list[dict]:
    """Return the runs of `recipes/configs/recovery_smollm2.yaml` at its learning rates. Their reference is BF16 from
    dithered master weights at its best rate, because quantized policies are dithered too."""
    runs = []
    for record in records("recovery_smollm2"):
        if record["learning_rate"] == record["options"].get("learning_rate", 2e-5):
            mean_of_curve = fmean(value for _, value in record["curves"]["greedy/first_line"])
            runs.append({**record, "reference": "policy", "mean_of_curve": mean_of_curve})
    return runs


def recovery() -> str:
    """Return the table of the earlier grid, with what ran where."""
    return _grid_table(runs_at_the_best_rate())


def _grid_table(runs: list[dict]) -> str:
    """Return the table of a grid under a line that says what ran where."""
    if not runs:
        return "Not run yet.\n"
    first = runs[0]
    # The command of some runs names a learning rate that the file has by now.
    command = min(run["command"] for run in runs)
    dates = " to ".join(sorted({min(run["date"] for run in runs), max(run["date"] for run in runs)}))
    caption = f"**{first['model']}**: {first['shape']}; {len(runs)} runs on {first['hardware']}; `{command}`, {dates}"
    return f"{caption}\n\n{markdown_table(*table_rows(runs))}"
