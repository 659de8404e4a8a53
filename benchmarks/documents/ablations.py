# SPDX-License-Identifier: Apache-2.0
"""Tables of the ablation on a real model.

python recipes/ablation.py --config recipes/configs/ablation_smollm2.yaml
cp outputs/ablation_smollm2/ablation.json benchmarks/results/ablation_smollm2.json
python -m benchmarks.write_docs
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_mxfp4.lab.stats import t_interval
from recipes.ablations.results import markdown

from ..records import RESULTS, table


RECORDS = RESULTS / "ablation_smollm2.json"
#: What is claimed, the cell that should be better (or, with -1, worse) than the other, in points of the sign given.
CLAIMS = (
    ("Plain MXFP4 costs accuracy", "mxfp4", "bf16", -1),
    ("Weights alone in MXFP4 cost less than weights and activations", "w4a16", "mxfp4", 1),
    ("Macro-block scaling gives some of it back", "mbs", "mxfp4", 1),
    ("Outlier fallback gives some of it back", "of", "mxfp4", 1),
    ("Both together are better than fallback alone", "mbs_of", "of", 1),
    ("Noise alone helps", "aqn", "mxfp4", 1),
    ("Noise helps on top of macro-block scaling", "aqn_mbs", "mbs", 1),
    ("Noise helps on top of both", "aqn_mbs_of", "mbs_of", 1),
    ("Fallback with alpha 0.5 is better than with 1", "mbs_of", "mbs_of1", 1),
    ("All three are still below full precision", "aqn_mbs_of", "bf16", -1),
    ("Scales that round up cost less than OCP's floor rule", "mxfp4", "floor", 1),
    ("Macro-block scaling helps where weights alone are in MXFP4", "w4a16_mbs", "w4a16", 1),
    ("Ours: a better number format of the same size beats MBS", "best", "mbs", 1),
    ("Ours: noise helps on top of that format", "best_aqn", "best", 1),
    ("Ours: block mantissas beat MBS, same size", "blockwise", "mbs", 1),
    ("Ours: block mantissas and whole residuals beat MBS + OF, same cost", "ours", "mbs_of", 1),
    ("Ours: noise helps on top of these", "ours_aqn", "ours", 1),
    ("Ours: residuals of 5 % of the blocks beat none", "tuned", "blockwise", 1),
    ("Ours: these, at 4.5 bits, beat MBS + OF at 8.6", "tuned", "mbs_of", 1),
    ("Plain MXFP4 trains better where ties of masters are dithered", "mxfp4", "mxfp4_ties", 1),
    ("MBS trains better where ties of masters are dithered", "mbs", "mbs_ties", 1),
    ("Ours trains better where ties of masters are dithered", "ours", "ours_ties", 1),
    ("Without that dither, MBS gives some of it back", "mbs_ties", "mxfp4_ties", 1),
)


def ablation(path: Path = RECORDS) -> str:
    """Return the table of the ablation on a real model, with what ran where."""
    runs = json.loads(path.read_text())
    first, hours = runs[0], sum(r["seconds"] for r in runs) / 3600
    made = f"{first['shape']}; {len(runs)} runs, {hours:.1f} h on {first['hardware']}"
    return f"**{first['model']}**: {made}; `{first['command']}`, {first['date']}\n\n{markdown(runs, first['model'])}"


def ablation_claims(path: Path = RECORDS) -> str:
    """Return the claims of arXiv 2605.20402 that its cells can be asked about."""
    return claims_table(json.loads(path.read_text()))


def claims_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Differences of accuracies after RL in points, paired by seed, with 95 % intervals over seeds.

    *Holds* and *contradicted*: the interval is on one side of zero. *Points that way* and *points the other way*: it is
    not, and all seeds are. *Not seen*: neither.
    """
    values: dict[str, dict[int, float]] = {}
    papers: dict[str, Mapping[str, float]] = {}
    for record in records:
        values.setdefault(record["cell"], {})[record["seed"]] = 100 * record["value"]
        papers[record["cell"]] = record["paper"]
    rows = []
    for claim, cell, other, sign in CLAIMS:
        seeds = sorted(set(values.get(cell, {})) & set(values.get(other, {})))
        if not seeds:
            continue
        differences = [values[cell][seed] - values[other][seed] for seed in seeds]
        found = t_interval(differences)
        text = f"{found['mean']:+.1f}"
        if found["interval"] is not None:
            text += " [{:+.1f}, {:+.1f}]".format(*found["interval"])
        rows.append(
            [
                claim,
                text,
                verdict([sign * value for value in differences], found["interval"]),
                _in_the_paper(papers[cell], papers[other]),
            ]
        )
    return table(["claim", "measured, points", "verdict", "in the paper"], rows)


def verdict(in_favour: Sequence[float], interval: Sequence[float] | None) -> str:
    """In words; ``in_favour`` is positive for a seed that agrees with the claim. The interval may be of either sign."""
    if interval is not None and interval[0] * interval[1] > 0:
        return "holds" if sum(in_favour) > 0 else "contradicted"
    if all(value > 0 for value in in_favour):
        return "points that way"
    if all(value < 0 for value in in_favour):
        return "points the other way"
    return "not seen"


def _in_the_paper(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    shared = [name for name in one if name in other]
    return ", ".join(f"{one[name] - other[name]:+.1f} ({name})" for name in shared)
