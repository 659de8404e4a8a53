# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of the ablations whose records are in `benchmarks/results/ablation_*.json`.

python recipes/ablation.py --config recipes/configs/ablation_cpu.yaml
cp outputs/ablation_cpu/ablation.json benchmarks/results/ablation_cpu.json
python -m benchmarks.write_docs
"""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from recipes.ablations.results import markdown, models

from ..records import RESULTS, table
from .ablation_claims import claims_table


NONE_YET = (
    "No ablation has been recorded yet. This runs one and puts its table here:\n\n"
    "```bash\npython recipes/ablation.py --config recipes/configs/ablation_cpu.yaml\n"
    "cp outputs/ablation_cpu/ablation.json benchmarks/results/ablation_cpu.json\n"
    "python -m benchmarks.write_docs\n```\n"
)
#: What the logs say of a run, beside its accuracy: title, metric, digits.
_DIAGNOSTICS = (
    ("reward, all steps", "reward", 3),
    ("importance ratio, mean", "sampling/importance_sampling_ratio/mean", 4),
    ("clipped tokens", "sampling/importance_sampling_ratio/clipped", 4),
    ("KL, rollout to training", "sampling/kl", 5),
    ("effective sample size", "sampling/effective_sample_size", 4),
    ("groups of equal reward", "frac_reward_zero_std", 3),
    ("length", "completions/mean_length", 1),
)


def ablation(folder: Path = RESULTS) -> str:
    """The table of each model that there are records of, in words where there is none."""
    parts = []
    for _, found in _recorded(folder):
        for model in models(found):
            runs = [r for r in found if r["model"] == model]
            first, hours = runs[0], sum(r["seconds"] for r in runs) / 3600
            made = f"{first['shape']}; {len(runs)} runs, {hours:.1f} h on {first['hardware']}"
            parts.append(f"**{model}**: {made}; `{first['command']}`, {first['date']}\n")
            parts.append(markdown(found, model))
    return "\n".join(parts) if parts else NONE_YET


def ablation_diagnostics(folder: Path = RESULTS) -> str:
    """Entropy, importance ratios and times of the runs, means over steps and seeds; in words where there are none."""
    parts = []
    for _, found in _recorded(folder):
        for model in models(found):
            runs = [r for r in found if r["model"] == model]
            shown = [d for d in _DIAGNOSTICS if any(d[1] in r["metrics"] for r in runs)]
            rows = []
            for cell in dict.fromkeys(r["cell"] for r in runs):
                of_cell = [r for r in runs if r["cell"] == cell]
                row = [of_cell[0]["label"], _numbers(r["n_quantized"] for r in of_cell)]
                row += [f"{fmean(r['seconds'] for r in of_cell) / 60:.1f}"]
                row += [" -> ".join(f"{fmean(r['entropy'][i] for r in of_cell):.3f}" for i in (0, 1))]
                for _, key, digits in shown:
                    values = [r["metrics"][key] for r in of_cell if key in r["metrics"]]
                    row.append(f"{fmean(values):.{digits}f}" if values else "")
                rows.append(row)
            columns = [
                "cell",
                "quantized layers",
                "minutes a run",
                "entropy, first to last",
                *(title for title, _, _ in shown),
            ]
            parts += [f"**{model}**\n", table(columns, rows)]
    return "\n".join(parts) if parts else "No ablation has been recorded yet.\n"


def ablation_claims(folder: Path = RESULTS) -> str:
    """The claims that the recorded cells can be asked about; in words where there are none."""
    parts = []
    for _, found in _recorded(folder):
        for model in models(found):
            parts += [f"**{model}**\n", claims_table(found, model)]
    return "\n".join(parts) if parts else "No ablation has been recorded yet.\n"


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(values))))


def _recorded(folder: Path) -> list[tuple[Path, list[dict]]]:
    """The records of every ablation, by name from the last to the first: real models before the small ones of
    ``ablation_cpu``."""
    paths = sorted(folder.glob("ablation_*.json"), reverse=True)
    return [(path, json.loads(path.read_text())) for path in paths]
