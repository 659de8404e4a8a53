# SPDX-License-Identifier: Apache-2.0
"""Records of distillation on a real model, of what `recipes/distill.py` left in its output folders.

    python -m benchmarks.distillation outputs/distill_smollm2 --start smoothed

Adds to `benchmarks/results/distillation.json` a record for each held-out text, in place of those of the same run.
"""

import json
import shlex
from pathlib import Path

import yaml

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import ModelScheme

from .records import made, option_parser, recorded, write


PACKAGES = ("torch", "transformers", "trl", "accelerate")
SCHEME = ("mode", "preset", "outlier_fallback", "fprop")
#: Options of a run that the command of its records names.
NAMED = (
    "preset fprop smooth gptq per_device_train_batch_size learning_rate max_steps max_length evaluate_n "
    "outlier_fallback"
).split()


def main() -> None:
    parser = option_parser(__doc__, "distillation")
    parser.add_argument("folder", type=Path, help="output folder of a finished run")
    parser.add_argument("--start", required=True, help="what the student started from: 'as it is', 'smoothed', ...")
    options = parser.parse_args()
    added = records_of(options.folder, options.start)
    kept = [old for old in recorded(options.out) if old["command"] != added[0]["command"]]
    write([*kept, *added], options.out)


def records_of(folder: Path, start: str) -> list[dict]:
    """Return a record for each held-out text of a run."""
    summary = json.loads((folder / "summary.json").read_text())
    used = yaml.safe_load((folder / "resolved_config.yaml").read_text())["options"]
    used["fprop"] = dict(used["fprop"]) if used["fprop"] else None
    scheme = ModelScheme("", MXFP4RLConfig(**{name: used[name] for name in SCHEME}))
    given = {name: used[name] for name in NAMED if used.get(name) is not None}
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in given.items()]
    config = "python recipes/distill.py --config recipes/configs/distill_smollm2.yaml"
    run = {
        "scheme": summary["scheme"],
        "bits": scheme.weight_bits,
        "start": start,
        "model": "SmolLM2-135M-Instruct",
        "steps": summary["steps"],
        "tokens": summary["tokens_distilled"],
        "learning_rate": used["learning_rate"],
        "seconds": summary["seconds"],
        "ceiling_fraction": None,
    } | made(f"{config} {' '.join(words)}  # from: {start}", PACKAGES)
    records = []
    for text, after in summary["after"].items():
        before = summary["before"][text]
        records.append(
            {
                "name": text,
                "shape": f"at most {used['evaluate_n'] or 24} texts of at most {used['max_length']} tokens",
                "value": after["perplexity"],
                "unit": "perplexity",
                "baseline": after["teacher_perplexity"],
                "ratio": after["perplexity"] / after["teacher_perplexity"],
                "kl": after["kl"],
                "kl_before": before["kl"],
                "perplexity_before": before["perplexity"],
                **run,
            }
        )
    return records


if __name__ == "__main__":
    main()
