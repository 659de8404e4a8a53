# SPDX-License-Identifier: Apache-2.0
"""The summary of a pretraining study as `benchmarks/results/pretrain.json`, one record per arm.

    python recipes/pretrain.py --config recipes/configs/pretrain_study_cpu.yaml
    python -m benchmarks.pretrain_study outputs/pretrain_study_cpu/summary.json

`value` is the token overhead over the baseline, mean over seeds; "not reached" where a seed did not reach its target.
"""

import argparse
import json
from pathlib import Path

from hf_mxfp4.recipes.pretraining.arguments import BASELINE
from hf_mxfp4.recipes.pretraining.summary import PAPER

from .records import RESULTS, hardware, made, write


PACKAGES = ("torch", "transformers", "accelerate", "datasets")


def record(arm: str, summary: dict, command: str, machine: str) -> dict:
    """Return the benchmark record of one arm of a study's `summary.json`."""
    result = summary["arms"][arm]
    value = result["overhead"]["mean"]
    ratio = None
    if value is not None:
        ratio = round(1 / (1 + value), 4)
    steps = summary["steps"]
    size = summary["tokens_per_step"]
    return {
        "name": arm,
        "shape": f"{summary['parameters'] / 1e6:.2f} M parameters, {steps} steps of {size} tokens",
        "value": "not reached" if value is None else value,
        "unit": "token overhead",
        "baseline": 0.0,
        "ratio": ratio,
        "ceiling_fraction": None,
        "precision_of_baseline": summary["baseline"],
        "target_fraction": summary["target_fraction"],
        "budget_tokens": summary["budget_tokens"],
        "entropy": summary["entropy"],
        "paper": stated(arm),
        **result,
        **made(command, PACKAGES, machine),
    }


def stated(arm: str) -> str | None:
    """Return the token overhead over FP8 that arXiv 2605.09825 states for an arm."""
    if arm not in PAPER:
        return None
    if PAPER[arm] is None:
        return "does not converge"
    return "{}-{} %".format(*PAPER[arm])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path)
    parser.add_argument(
        "--command",
        default="python recipes/pretrain.py --config recipes/configs/pretrain_study_cpu.yaml",
        help="what ran the study, for the record",
    )
    parser.add_argument("--hardware", default=None, help="what it ran on, where that is not this machine")
    arguments = parser.parse_args()
    summary = json.loads(arguments.summary.read_text())
    machine = arguments.hardware or hardware()
    records = [record(arm, summary, arguments.command, machine) for arm in summary["arms"]]
    write(records, RESULTS / "pretrain.json", indent=1)
    for entry in records:
        if entry["name"] != BASELINE:
            print(f"{entry['name']}: {entry['value']} {entry['unit']}")


if __name__ == "__main__":
    main()
