# SPDX-License-Identifier: Apache-2.0
"""What merging LoRA adapters into packed weights costs a policy; writes `benchmarks/results/merge_cost.json`.

    python recipes/grpo.py --config recipes/configs/tiny_cpu_lora.yaml --seed 0      # and 1 and 2
    python -m benchmarks.merge_cost outputs/tiny_cpu_lora ...

For every run folder of the recipe: greedy accuracy on its 500 held-out problems with the adapters beside the packed
base, merged into bfloat16 weights, and merged into packed weights.
"""

import platform
from pathlib import Path
from statistics import fmean

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mxfp4
from recipes.evaluation.generate import evaluate_greedy
from recipes.tasks import load_task

from .records import RESULTS, made, option_parser, write


COMMAND = "python -m benchmarks.merge_cost outputs/tiny_cpu_lora ..."
WAYS = ("adapters beside the packed base", "merged into bfloat16", "merged into packed")


def measure(run: Path) -> dict[str, tuple[float, float | None]]:
    """Accuracy, and the SQNR of what the adapters add, by the way that they are kept."""
    task = load_task("arithmetic")
    tokenizer = AutoTokenizer.from_pretrained(run / "base")
    found = {}
    for way in WAYS:
        config = hf_mxfp4.MXFP4RLConfig(mode="packed")
        base = AutoModelForCausalLM.from_pretrained(run / "base", quantization_config=config)
        model, sqnr = PeftModel.from_pretrained(base, run / "policy"), None
        if way != WAYS[0]:
            model = hf_mxfp4.merge_adapters(model, into="bf16" if way == WAYS[1] else "packed")
            sqnr = model.merge_report.total.update_sqnr_db if way == WAYS[2] else None
        result = evaluate_greedy(
            model, tokenizer, task.test, task.scores, max_new_tokens=task.max_completion_length, batch_size=250
        )
        found[way] = (result.accuracy(task.headline), sqnr)
    return found


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    by_run = [measure(run) for run in parser.parse_args().runs]
    records = []
    baseline = fmean(found[WAYS[0]][0] for found in by_run)
    for way in WAYS:
        accuracies, sqnrs = zip(*(found[way] for found in by_run), strict=True)
        records.append(
            {
                "name": way,
                "shape": [len(by_run), 500],
                "value": fmean(accuracies),
                "unit": "greedy accuracy, mean over runs",
                "baseline": baseline,
                "ratio": fmean(accuracies) / baseline,
                "ceiling_fraction": None,
                "by_run": accuracies,
                "change_sqnr_db": sqnrs,
                **made(COMMAND, ("torch", "transformers", "peft"), f"{platform.machine()} CPU"),
            }
        )
        print(f"{way}: {fmean(accuracies):.3f} ({', '.join(f'{a:.3f}' for a in accuracies)})")
    write(records, RESULTS / "merge_cost.json")


if __name__ == "__main__":
    main()
