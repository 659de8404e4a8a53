# SPDX-License-Identifier: Apache-2.0
"""Tables of what runs gave and took: accuracy, time, memory, tokens; and of architectures."""

from collections import Counter

from hf_mxfp4.recipes.ablations.results import table_rows
from hf_mxfp4.recipes.common.reporting import markdown_table

from ..records import interval, records, table


def demo() -> str:
    rows = []
    for r in records("demo_cpu"):
        before, after = r["standard_error"]
        rows.append(
            [r["name"][-1], f"{r['baseline']:.3f} ± {before:.3f}", f"{r['value']:.3f} ± {after:.3f}"]
            + [f"{r['value'] - r['baseline']:+.3f}"]
        )
    return table(["seed", "before RL", "after RL", "gain"], rows)


def vllm_agreement() -> str:
    rows = []
    for r in records("vllm_agreement"):
        cells = [f"{r[key][part]:.1e}" for key in ("vllm", "last_bits") for part in ("median", "max")]
        shares = [f"{100 * r[key]['beyond_1e-3']:.1f}" for key in ("vllm", "last_bits")]
        rows.append([r["scheme"], *cells[:2], shares[0], *cells[2:], shares[1], f"{r['quantization']['median']:.2f}"])
    columns = ["scheme", "vLLM: median", "max", "beyond 1e-3, %", "last bits: median", "max", "beyond 1e-3, %"]
    return table([*columns, "quantization, median"], rows)


def memory() -> str:
    parts = ("weights", "gradients", "optimizer", "saved", "peak")
    rows = [
        [*r["name"].split(" / checkpointing "), *(f"{r['measured'][part] / 1e6:.0f}" for part in parts)]
        for r in records("memory")
    ]
    return table(["mode", "checkpointing", *parts], rows)


def pretrain() -> str:
    rows = []
    for r in records("pretrain"):
        if r["name"] in ("baseline", "all_oscireset"):  # the second is gone
            continue
        overhead = r["overhead"]
        operands = sum(count > 0 for count in r["quantized_operands"].values())
        cells = [interval(overhead, 100, 1), str(overhead["n"]), interval(r["gap"], 1, 4), r["paper"] or ""]
        rows.append([f"`{r['name']}`", str(operands), *cells])
    columns = ["arm", "quantized operands", "more tokens, %", "seeds", "loss above the baseline's"]
    return table([*columns, "paper: more tokens"], rows)


def quantize_cpu() -> str:
    dropped = "fouroversix", "microxcaling", "searched", "dequantize"
    found = [r for r in records("quantize_cpu") if not any(name in r["name"] for name in dropped)]
    rows = [[*r["name"].split(" / "), f"{r['value']:.3g}", f"{r['ratio']:.2f}"] for r in found if r["shape"][0] == 4096]
    return table(["operation", "contender", "GB/s", "time / ours"], rows)


def packed_product_cpu() -> str:
    """Return the largest weight on one thread, by rows and contender."""
    found = [r for r in records("packed_product_cpu") if r["threads"] == 1 and r["shape"][1:] == [4096, 14336]]
    names = list(dict.fromkeys(r["name"] for r in found))
    cells: dict[int, dict[str, str]] = {}
    for r in found:
        text = f"{r['value']:.2f}" if r["ratio"] == 1 else f"{r['value']:.2f} ({r['ratio']:.2f})"
        cells.setdefault(r["shape"][0], {})[r["name"]] = text
    rows = [[name, *(own[name] for own in cells.values())] for name in names]
    columns = [f"{count} row{'s' * (count > 1)}" for count in cells]
    return f"{table(['', *columns], rows)}\n{found[0]['hardware']}, {found[0]['date']}\n"


def architectures() -> str:
    """Return the architectures that are right by kind, and those that are not."""
    found = records("architectures")
    outcomes = ("right", "refused", "wrong", "not tried")
    counts = Counter(record["outcome"] for record in found)
    parts = [f"{len(found)} architectures: {', '.join(f'{counts[each]} {each}' for each in outcomes)}.\n"]
    kinds: dict[str, list[str]] = {}
    for record in found:
        if record["outcome"] == "right":
            kinds.setdefault(record["kind_of_model"], []).append(f"`{record['name']}`")
    parts += [f"* {kind}: {' '.join(names)}" for kind, names in kinds.items()] + [""]
    for outcome in ("refused", "wrong"):
        if names := [f"`{record['name']}`" for record in found if record["outcome"] == outcome]:
            parts.append(f"{outcome.capitalize()}: {' '.join(names)}\n")
    return "\n".join(parts)


def runs_at_the_best_rate() -> list[dict]:
    """Return the runs of `recipes/configs/recovery_smollm2.yaml` at its learning rates."""
    return [r for r in records("recovery_smollm2") if r["learning_rate"] == r["options"].get("learning_rate", 2e-5)]


def recovery() -> str:
    """Return the table of RL on a real model, with what ran where."""
    runs = [r for r in runs_at_the_best_rate() if not r["cell"].startswith("mxfp4_")]
    first, minutes = runs[0], sum(r["seconds"] for r in runs) / len(runs) / 60
    made = f"{first['shape']}; {len(runs)} runs of {minutes:.1f} minutes, 10 or 12 at a time, on {first['hardware']}"
    return f"**{first['model']}**: {made}; `{first['command']}`, {first['date']}\n\n{markdown_table(*table_rows(runs))}"


def recovery_cpu() -> str:
    """Return the cells that a CPU ran with one seed, and the corrections of plain MXFP4."""
    found: dict[str, list[str]] = {}
    corrections = [r for r in runs_at_the_best_rate() if r["cell"].startswith("mxfp4_")]
    for r in records("recovery_cpu") + corrections:
        found.setdefault(r["label"], []).append(f"{100 * r['value']:.1f}")
    return table(["cell", "after RL"], [[label, ", ".join(values)] for label, values in found.items()])


def recovery_rates() -> str:
    """Return accuracies of seed 0 by cell and learning rate."""
    found: dict[str, dict[float, str]] = {}
    for r in records("recovery_smollm2"):
        if r["seed"] == 0:
            found.setdefault(r["label"], {})[r["learning_rate"]] = f"{100 * r['value']:.1f}"
    rates = sorted({rate for cells in found.values() for rate in cells})
    rows = [[label, *(cells.get(rate, "") for rate in rates)] for label, cells in found.items() if len(cells) > 1]
    return table(["cell", *(f"{rate:g}" for rate in rates)], rows)
