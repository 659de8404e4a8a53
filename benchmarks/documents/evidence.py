# SPDX-License-Identifier: Apache-2.0
"""Tables and a plot of schemes on real models, from the records of `benchmarks.evidence` and some of before."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from matplotlib.figure import Figure

from hf_mxfp4.lab.evaluation.intervals import ratio_of_sums
from hf_mxfp4.recipes.ablations.results import statistics

from ..records import records, table
from .runs import runs_at_the_best_rate


#: What the two papers have, as scheme strings.
PAPERS = {
    "rceil": "plain MXFP4",
    "floor": "plain MXFP4, OCP's rule",
    "rceil+mbs128-static": "+ MBS",
    "rceil+of0.5": "+ OF",
    "rceil+mbs128-hybrid": "+ MBS, hybrid",
    "rceil+mbs128-hybrid+of0.5": "+ MBS + OF",
    "paper_b": "2605.09825",
}
BUDGETS = (4.25, 4.32, 8.6)
#: Variants as the tables name them.
AS_IT_IS, SMOOTHED, ROUNDED, ROTATED = "as it is", "smoothed", "smoothed, GPTQ", "smoothed, GPTQ for H64"
FOR_BOTH = "smoothed, GPTQ for H64 and quantized inputs"
OURS = "even+mbs128-blockwise"
#: Ids that need no data, as records name them.
DRAWN = ("own samples", "random ids")
#: Rows of the first page: name, tensor cores of Hopper and Blackwell, record of the loss, cell of the RL experiment.
FIRST_PAGE = (
    ("BF16", "BF16", "BF16", None, "bf16"),
    ("plain MXFP4", "FP8", "FP4", (AS_IT_IS, "rceil"), "mxfp4"),
    ("the paper's MBS + OF", "BF16", "BF16", (AS_IT_IS, "rceil+mbs128-hybrid+of0.5"), "paper_a"),
    ("W4A4, block mantissas, whole residuals", "BF16", "BF16", (AS_IT_IS, f"{OURS}+of1"), "default"),
    ("**the default**: W4A8, smoothed", "FP8", "FP8", (SMOOTHED, f"w4a8:{OURS}_fp8"), "w4a8_smoothed"),
    ("W4A8, smoothed and distilled", "FP8", "FP8", "w4a8", "w4a8_distilled"),
)


@dataclass(frozen=True)
class Claim:
    """That one scheme is better than another, both on the checkpoint as it is."""

    text: str
    better: str
    worse: str


CLAIMS = (
    Claim("MBS gives some of the loss back (static, the paper's)", "rceil+mbs128-static", "rceil"),
    Claim("Outlier fallback gives some of it back", "rceil+of0.5", "rceil"),
    Claim("Both are better than fallback alone", "rceil+mbs128-hybrid+of0.5", "rceil+of0.5"),
    Claim("Weights alone lose less than weights and activations", "w4a16:rceil", "rceil"),
    Claim("Scales that round up lose less than OCP's floor rule", "rceil", "floor"),
    Claim("Ours: `even` loses less than `rceil`", "even", "rceil"),
    Claim("Ours: block mantissas lose less than MBS, same size", OURS, "rceil+mbs128-static"),
    Claim("Ours: alpha 1 loses less than the paper's 0.5, same cost", "rceil+of1", "rceil+of0.5"),
    Claim("Ours: a rotation by H64 loses less", f"{OURS}, H64", OURS),
)


def _by_text() -> dict[str, dict[tuple[str, str], dict]]:
    """Return records of each text by variant and scheme; the text with the most of them first. Left out are residuals
    of selected blocks (`of1@0.05`), which schemes had once."""
    found: dict[str, dict[tuple[str, str], dict]] = {}
    for r in records("evidence"):
        if "@" not in r["name"]:
            found.setdefault(r["text"], {})[r["variant"], r["name"]] = r
    return found


def _kl(r: dict | None) -> str:
    return "" if r is None else f"{r['kl']:.3f} ± {r['kl_standard_error']:.3f}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def readme_evidence() -> str:
    """Return the first page: what a scheme stores, what multiplies it, what it loses, and where RL ends."""
    trained = {row["cell"]: row for row in statistics(runs_at_the_best_rate())}
    found = {**next(iter(_by_text().values())), None: {"bits": 16, "kl": 0.0}}
    found |= {(r["variant"], r["name"]): r for r in reversed(records("tensor_cores"))}
    learned = [r for r in records("distillation") if r["name"] == "test"]
    found |= {r["scheme"].split(" ")[0] + ", H64" * ("rotation" in r["scheme"]): r for r in reversed(learned)}
    rows = []
    for name, hopper, blackwell, place, cell in FIRST_PAGE:
        run = trained[cell]
        spread = "(one seed)" if run["over_seeds"] is None else f"± {100 * run['over_seeds']:.1f}"
        loss = found[place]
        rows.append(
            [
                name,
                _number(loss.get("weight_bits", loss["bits"])),
                hopper,
                blackwell,
                f"{loss['kl']:.3f}",
                f"{100 * run['after']:.1f} {spread}",
            ]
        )
    columns = ["scheme", "bits of a weight", "Hopper", "Blackwell", "KL, GSM8K", "accuracy after RL, %"]
    return table(columns, rows)


def _short(text: str) -> str:
    return "GSM8K" if text.startswith("gsm8k") else "Shakespeare" if "shakespeare" in text else text


def _both_operands(found: dict[tuple[str, str], dict]) -> list[dict]:
    return [r for r in found.values() if r["products"] is not None]


def evidence_front() -> str:
    """Return for each budget of bits the best scheme of weights and activations, and the best of the papers'."""
    first, *others = _by_text().values()
    rows = []
    for budget in BUDGETS:
        within = [r for r in _both_operands(first) if r["bits"] <= budget]
        best = min(within, key=lambda r: r["kl"])
        theirs = [r for r in within if r["variant"] == AS_IT_IS and r["name"] in PAPERS]
        paper = min(theirs, key=lambda r: r["kl"])
        again = [_kl(each.get((best["variant"], best["name"]))) for each in others]
        rows.append([f"{budget:g}", f"{best['variant']}: `{best['name']}`", _number(best["bits"]), _kl(best)])
        rows[-1] += [f"{best['value']:.2f}", *again, f"`{paper['name']}`", _kl(paper)]
    texts = [f"KL, {_short(text)}" for text in _by_text()]
    columns = ["bits at most", "best: checkpoint and scheme", "bits", texts[0], "perplexity", *texts[1:]]
    return table([*columns, "best of the papers'", "KL"], rows)


def evidence_claims() -> str:
    """Return differences of two schemes on each model and text, and whether they hold."""
    model, encoder = records("evidence")[0]["model"], records("encoder_evidence")
    columns = {f"{model}, {_short(text)}: KL": found for text, found in _by_text().items()}
    columns[f"{encoder[0]['model']}: 1 - cos"] = {(r["variant"], r["name"]): r for r in encoder}
    rows = []
    for claim in CLAIMS:
        pairs = [[found.get((AS_IT_IS, name)) for name in (claim.better, claim.worse)] for found in columns.values()]
        rows.append([claim.text, *(_verdict(*pair) for pair in pairs)])
    return table(["claim", *columns], rows)


def _verdict(better: dict | None, worse: dict | None) -> str:
    """Return the difference, as if both were of other texts, which makes its error too large."""
    if better is None or worse is None:
        return ""
    (a, da), (b, db) = (_value(r) for r in (better, worse))
    error = 1.96 * math.hypot(da, db)
    said = "holds" if a + error < b else "the other way" if a - error > b else "not told apart"
    return f"{said}: {b:.4g} -> {a:.4g} (± {error:.2g})"


def _value(r: dict) -> tuple[float, float]:
    return (r["kl"], r["kl_standard_error"]) if "kl" in r else (r["value"], r["standard_error"])


def evidence_plot() -> Figure:
    """KL over bits of weights and activations: the papers' schemes, ours, and ours on prepared checkpoints."""
    found = next(iter(_by_text().values()))
    figure = Figure(figsize=(8.5, 4.4), layout="constrained")
    axes = figure.subplots()
    kinds = {
        "the papers' schemes": lambda r: r["variant"] == AS_IT_IS and r["name"] in PAPERS,
        "ours, any checkpoint": lambda r: r["variant"] == AS_IT_IS and r["name"].startswith((OURS, f"w4a4:{OURS}")),
        "+ smoothing": lambda r: r["variant"] == SMOOTHED and r["name"].startswith(OURS) and "H64" not in r["name"],
        "+ GPTQ": lambda r: r["variant"] == ROUNDED,
        "+ rotation by H64": lambda r: r["variant"] == ROTATED,
        "+ GPTQ for quantized inputs": lambda r: r["variant"] == FOR_BOTH,
    }
    for color, (label, chosen) in enumerate(kinds.items()):
        points = sorted((r["bits"], r["kl"], r["kl_standard_error"]) for r in _both_operands(found) if chosen(r))
        bits, kl, errors = zip(*points, strict=True) if points else ((), (), ())
        axes.errorbar(
            bits, kl, [2 * e for e in errors], fmt="o", color=f"C{color}", markersize=4, capsize=2, label=label
        )
        lower = [p for p in points if not any(q[0] <= p[0] and q[1] < p[1] for q in points)]
        axes.plot([p[0] for p in lower], [p[1] for p in lower], color=f"C{color}", linewidth=1, alpha=0.7)
    axes.set_yscale("log")
    axes.set_xlabel("bits of an operand, weights and activations quantized")
    axes.set_ylabel("KL to bfloat16, nats per token")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    return figure


def _cores() -> list[dict[str, dict[str, dict]]]:
    """Return records of schemes by what tensor cores multiply: for each text by name, then by variant."""
    found: dict[str, dict[str, dict[str, dict]]] = {}
    for r in records("tensor_cores"):
        found.setdefault(r["text"], {}).setdefault(r["name"].removesuffix(", H64"), {})[r["variant"]] = r
    return list(found.values())


def tensor_cores() -> str:
    """Return a row for each scheme: bits, what multiplies it, and what it loses on three checkpoints, by text."""
    texts, variants = _cores(), (AS_IT_IS, SMOOTHED, ROTATED)
    rows = []
    for name, by_variant in texts[0].items():
        first = by_variant[AS_IT_IS]
        rows.append([f"`{name}`", _number(first["weight_bits"]), *first["tensor_cores"]])
        for found in (text.get(name, {}).get(variant) for text in texts for variant in variants):
            rows[-1].append("" if found is None else f"{found['kl']:.3f} ({found['value']:.2f})")
    ones = [next(iter(next(iter(text.values())).values())) for text in texts]
    baselines = ", ".join(f"{one['baseline']:.2f}" for one in ones)
    commands = ", ".join(f"`{one['command']}`" for one in ones)
    note = (
        f"KL to bfloat16 in nats per token (perplexity; {baselines} in bfloat16), standard errors at most "
        f"{max(r['kl_standard_error'] for r in records('tensor_cores')):.3f}; {commands}"
    )
    columns = [f"{_short(one['text'])}, {variant}" for one in ones for variant in variants]
    return f"{table(['scheme', 'bits of a weight', 'Hopper', 'Blackwell', *columns], rows)}\n{note}\n"


def tensor_cores_plot() -> Figure:
    """KL over the mean bits of both operands, by what multiplies; lines go to the smoothed and rounded checkpoints."""
    figure = Figure(figsize=(8.5, 4.4), layout="constrained")
    axes = figure.subplots()
    kinds = sorted({tuple(r["tensor_cores"]) for r in records("tensor_cores")})
    for color, kind in enumerate(kinds):
        axes.plot([], [], "o", color=f"C{color}", label="{} on Hopper, {} on Blackwell".format(*kind))
    for name, by_variant in _cores()[0].items():
        (bits, kl), *_ = points = [
            ((r["weight_bits"] + 16) / 2 if name.startswith("w4a16") else r["bits"], r["kl"])
            for r in by_variant.values()
        ]
        color = f"C{kinds.index(tuple(by_variant[AS_IT_IS]['tensor_cores']))}"
        axes.plot(*zip(*points, strict=True), "-o", markersize=4, color=color)
        axes.annotate(name, (bits, kl), xytext=(5, -2), textcoords="offset points", fontsize=6)
    axes.set(
        yscale="log",
        xlim=(4, 12),
        xlabel="mean bits of both operands, 16 in full precision",
        ylabel="KL to bfloat16, nats per token",
    )
    axes.legend(fontsize=8)
    return figure


def gptq() -> str:
    """Return what rounding saves beside the nearest values, smoothed or not."""
    texts = _by_text()
    shown = [
        (variant, name)
        for variant, name in next(iter(texts.values()))
        if variant in (SMOOTHED, ROUNDED, ROTATED)
        and name.removesuffix(", H64") in (f"w4a16:{OURS}", OURS)
        or (variant, name) in ((AS_IT_IS, f"w4a16:{OURS}"), (AS_IT_IS, OURS))
    ]
    rows = []
    for variant, name in shown:
        found = [each.get((variant, name)) for each in texts.values()]
        cells = [cell for r in found for cell in (_kl(r), "" if r is None else f"{r['value']:.2f}")]
        rows.append([variant, f"`{name}`", _number(next(iter(texts.values()))[variant, name]["bits"]), *cells])
    columns = [cell for text in texts for cell in (f"KL, {_short(text)}", "perplexity")]
    return table(["checkpoint", "scheme", "bits", *columns], rows)


def smoothing() -> str:
    """Return a row for each scheme, and what it loses by strength."""
    found: dict[str, dict[object, dict]] = {}
    for r in records("smoothing"):
        if "@" not in r["name"]:  # residuals of selected blocks, which schemes had once
            found.setdefault(r["name"], {})[r["strength"]] = r
    strengths = list(dict.fromkeys(strength for row in found.values() for strength in row))
    rows = [
        [name, f"{next(iter(row.values()))['bits']:.4g}"]
        + [f"{r['kl']:.3f} ± {r['kl_standard_error']:.3f} ({r['value']:.2f})" for r in (row[s] for s in strengths)]
        for name, row in found.items()
    ]
    columns = [f"strength {s}" if isinstance(s, float) else "as it is" for s in strengths]
    one = records("smoothing")[0]
    what = f"KL in nats per token ± standard error (perplexity; {one['baseline']:.2f} in bfloat16), {one['model']}."
    return f"{table(['scheme', 'bits of an operand', *columns], rows)}\n{what}\n"


def preparation() -> str:
    """Return a row for each step, model, scheme and text: what it loses by the data that it was prepared on, and by how
    much that is more than on texts, paired by text."""
    found: dict[tuple, dict[tuple[str, str], list[dict]]] = {}
    for r in records("preparation"):
        place = (r["step"], r["model"], r["name"], r["text"])
        found.setdefault(place, {}).setdefault((r["calibration"]["kind"], _size(r)), []).append(r)
    rows = []
    for (step, model, scheme, text), by_data in found.items():
        none, on_text = (next((rs for (kind, _), rs in by_data.items() if kind == k), None) for k in ("none", "GSM8K"))
        for size in dict.fromkeys(size for kind, size in by_data if kind in DRAWN):
            drawn = [by_data.get((kind, size)) for kind in DRAWN]
            cells = [_beside(rs, on_text) for rs in (none, on_text, *drawn)]
            rows.append([f"{step}, {size}", model, f"`{scheme}`", _short(text), *cells])
    return table(["step, rows x tokens", "model", "scheme", "text", "without", "GSM8K", *DRAWN], rows)


def _size(r: dict) -> str:
    return "{rows} x {length}".format(**r["calibration"])


def _beside(found: list[dict] | None, others: list[dict] | None) -> str:
    """Return the mean KL over seeds, with its difference to ``others`` and the standard error of that, by texts and
    seeds; its own standard error where both are the same."""
    if not found:
        return ""
    mean = fmean(r["value"] for r in found)
    if found is others or not others:
        return f"{mean:.3f} ± {found[0]['standard_error']:.3f}"
    tokens, paired = others[0]["tokens_by_text"], zip(*(r["kl_by_text"] for r in found), strict=True)
    sums = [fmean(kls) - kl for kls, kl in zip(paired, others[0]["kl_by_text"], strict=True)]
    difference, error = ratio_of_sums(sums, tokens)
    if len(found) > 1:
        error = math.hypot(error, stdev(r["value"] for r in found) / len(found) ** 0.5)
    seeds = f", {len(found)} seeds" if len(found) > 1 else ""
    return f"{mean:.3f} ({difference:+.3f} ± {error:.3f}{seeds})"


def distillation() -> str:
    """Return a row for each run, with its divergence on each held-out text before and after."""
    runs: dict[str, dict[str, dict]] = {}
    for r in records("distillation"):
        runs.setdefault(r["command"], {})[r["name"]] = r
    rows, names = [], {"test": "GSM8K test", "python_topics": "Python topics"}
    for texts in runs.values():
        one = texts["test"]
        scheme = one["scheme"].split(" ")[0] + (", H64" if "rotation" in one["scheme"] else "")
        row = [scheme, f"{one['bits']:.2f}", one["start"], f"{one['learning_rate']:.0e}", f"{one['steps']}"]
        for r in (texts[name] for name in names):
            row += [f"{r['kl_before']:.3f} → {r['kl']:.3f}", f"{r['perplexity_before']:.2f} → {r['value']:.2f}"]
        rows.append(row)
    columns = [c for key, text in names.items() for c in (f"KL, {text}", f"perplexity ({texts[key]['baseline']:.2f})")]
    return table(["scheme", "bits", "start", "rate", "steps", *columns], rows)


def gguf_perplexity() -> str:
    rows = [
        [r["name"], f"{r['bits_per_weight']:.4g}", f"{r['value']:.2f}", f"{r['ratio']:.3f}"]
        + [f"{r['nats_to_bf16']:+.3f} ± {r['standard_error']:.3f}", f"{r['divergence']:.3f}"]
        + [f"{r['same_top_percent']:.1f}"]
        for r in records("gguf_perplexity")
    ]
    baseline = records("gguf_perplexity")[0]
    rows.insert(0, ["BF16", "16", f"{baseline['baseline']:.2f}", "1", "", "", ""])
    columns = ["file", "bits per weight of the layers", "perplexity", "over BF16", "nats per token to BF16"]
    return table([*columns, "divergence, nats", "same likeliest token, %"], rows)
