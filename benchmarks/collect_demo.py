# SPDX-License-Identifier: Apache-2.0
"""Gather the summaries of demo runs into `benchmarks/results/demo_cpu.json`, those of runs that trained LoRA adapters
on packed weights into `lora_cpu.json`, and those on a mixture of experts into `moe_cpu.json`.

    python -m benchmarks.collect_demo outputs/*/summary.json

One record per run: greedy held-out accuracy after RL (`value`) and before (`baseline`), their ratio, and the standard
errors that follow from the number of problems. For a mixture of experts also the mean of the last measured agreements
of its routers with full precision, from the `routers.jsonl` beside the summary.
"""

import argparse
import json
import platform
from pathlib import Path

from .records import RESULTS, made, write


RECIPES = {
    "lora": "accelerate launch recipes/grpo.py --config recipes/configs/tiny_cpu_lora.yaml",
    "moe": "accelerate launch recipes/grpo.py --config recipes/configs/tiny_moe_cpu.yaml",
}
PACKAGES = ("torch", "transformers", "trl", "accelerate", "numpy")


def record(summary: dict, folder: Path) -> dict:
    """The benchmark record of one run's `summary.json`, in its output folder."""
    (score,) = summary["accuracy_before"]
    mixture = summary["model"].startswith("qwen3_moe")
    kind = "lora" if summary.get("adapter", False) else "moe" if mixture else "demo"
    before, after = summary["accuracy_before"][score], summary["accuracy_after"][score]
    command = f'make demo ARGS="--seed {summary["seed"]}"'
    if kind in RECIPES:
        command = f"{RECIPES[kind]} --seed {summary['seed']}"
    return {
        "name": f"{kind}_cpu_seed{summary['seed']}",
        "shape": f"{summary['n_test']} held-out problems, {summary['steps']} GRPO steps",
        "value": after,
        "unit": f"greedy {score}",
        "baseline": before,
        "ratio": round(after / before, 4),
        "ceiling_fraction": after,
        "standard_error": [summary["standard_error_before"][score], summary["standard_error_after"][score]],
        "entropy": [summary["entropy_first"], summary["entropy_last"]],
        "scheme": summary["scheme"],
        "seconds": summary["seconds"],
        **made(command, PACKAGES, f"{platform.machine()} CPU"),
    } | ({"n_quantized": summary["n_quantized"], "router_agreement": agreement(folder)} if mixture else {})


def agreement(folder: Path) -> float:
    """The mean over the routers in the last measurement of a run."""
    rows = [json.loads(line) for line in (folder / "routers.jsonl").read_text().splitlines()]
    last = [row["agreement"] for row in rows if row["step"] == rows[-1]["step"]]
    return round(sum(last) / len(last), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summaries", nargs="+", type=Path)
    records = [record(json.loads(path.read_text()), path.parent) for path in parser.parse_args().summaries]
    for kind in ("demo_cpu", "lora_cpu", "moe_cpu"):
        found = sorted((r for r in records if r["name"].startswith(kind)), key=lambda entry: entry["name"])
        if found:
            write(found, RESULTS / f"{kind}.json")
    for entry in records:
        print(f"{entry['name']}: {entry['baseline']:.3f} -> {entry['value']:.3f} in {entry['seconds']:.0f} s")


if __name__ == "__main__":
    main()
