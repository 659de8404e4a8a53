# SPDX-License-Identifier: Apache-2.0
"""Tables of what schemes lose on real models, from the records of `benchmarks.evidence` and of RL."""

import math
from dataclasses import dataclass
from typing import Any

from hf_mxfp4.recipes.ablations.results import difference_cell, mean_cell, statistics

from ..records import records, table
from .runs import reported_runs


Record = dict[str, Any]
#: Records of one text by the variant of the checkpoint and the name of the scheme.
Results = dict[tuple[str, str], Record]

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
#: Most bits of an operand that a row of `evidence_front` allows.
BUDGETS = (4.25, 4.32, 8.6)
#: Variants of a checkpoint, as records name them.
AS_IT_IS = "as it is"
SMOOTHED = "smoothed"
ROUNDED = "smoothed, GPTQ"
ROTATED = "smoothed, GPTQ for H64"
FOR_BOTH = "smoothed, GPTQ for H64 and quantized inputs"
OURS = "even+mbs128-blockwise"


@dataclass(frozen=True)
class FirstPageRow:
    """A scheme in the README.

    Attributes:
        hopper, blackwell: what the tensor cores multiply.
        cell: of the RL experiment.
        loss: file and values of the record with the loss; `None` for full precision.
        is_student: the weights of RL are others than those of the record, which then gives the bits alone.
    """

    name: str
    hopper: str
    blackwell: str
    cell: str
    loss: tuple[str, Record] | None
    is_student: bool = False


_DEFAULT = ("tensor_cores", {"variant": SMOOTHED, "name": f"w4a8:{OURS}_fp8"})
FIRST_PAGE = (
    FirstPageRow("BF16", "BF16", "BF16", "bf16", None),
    FirstPageRow("plain MXFP4", "FP8", "FP4", "mxfp4", ("evidence", {"variant": AS_IT_IS, "name": "rceil"})),
    FirstPageRow(
        "the paper's MBS + OF, unsmoothed",
        "BF16",
        "BF16",
        "paper_a",
        ("evidence", {"variant": AS_IT_IS, "name": "rceil+mbs128-static+of0.5"}),
    ),
    FirstPageRow(
        "W4A4, block mantissas, whole residuals",
        "BF16",
        "BF16",
        "w4a4_residuals",
        ("evidence", {"variant": AS_IT_IS, "name": f"{OURS}+of1"}),
    ),
    FirstPageRow("**the default**: W4A8, smoothed", "FP8", "FP8", "w4a8_smoothed", _DEFAULT),
    FirstPageRow("W4A8, smoothed and distilled", "FP8", "FP8", "w4a8_distilled", _DEFAULT, is_student=True),
    FirstPageRow("BF16 in RL, then W4A8 by GPTQ", "FP8", "FP8", "bf16_then_gptq", _DEFAULT, is_student=True),
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


# ---- reading --------------------------------------------------------------------------------------------------------


def results_by_text(name: str = "evidence") -> dict[str, Results]:
    """Return the records of a file by text, without residuals of selected blocks (`of1@0.05`), which schemes had
    once."""
    found: dict[str, Results] = {}
    for record in records(name):
        if "@" not in record["name"]:
            found.setdefault(record["text"], {})[record["variant"], record["name"]] = record
    return found


def of_both_operands(results: Results) -> list[Record]:
    """Return the records of schemes that quantize weights and activations."""
    return [record for record in results.values() if record["products"] is not None]


def short_text(text: str) -> str:
    """Return the name of a text in tables."""
    if text.startswith("gsm8k"):
        return "GSM8K"
    if "shakespeare" in text:
        return "Shakespeare"
    return text


def kl_cell(record: Record | None) -> str:
    if record is None:
        return ""
    return f"{record['kl']:.3f} ± {record['kl_standard_error']:.3f}"


def bits_cell(bits: float) -> str:
    return f"{bits:.4g}"


# ---- tables ---------------------------------------------------------------------------------------------------------


def readme_evidence() -> str:
    """Return the first page: what a scheme stores, what multiplies it, what it loses, and where RL ends."""
    trained = {}
    for run in statistics(reported_runs()):
        trained[run["cell"]] = [
            f"{mean_cell(run['after'], run['over_seeds'])} ({len(run['seeds'])})",
            difference_cell(run["difference"]),
        ]
    rows = []
    for row in FIRST_PAGE:
        bits, kl = _loss_of(row)
        loss = "" if row.is_student else kl
        accuracies = trained.get(row.cell, ["not run", ""])
        rows.append([row.name, bits_cell(bits), row.hopper, row.blackwell, loss, *accuracies])
    columns = ["scheme", "bits of a weight", "Hopper", "Blackwell", "KL, GSM8K", "accuracy after RL, %", "minus BF16"]
    return table(columns, rows)


def _loss_of(row: FirstPageRow) -> tuple[float, str]:
    """Return the bits of a weight and the KL on GSM8K, from the first record that a row describes."""
    if row.loss is None:
        return 16, "0"
    name, wanted = row.loss
    for record in records(name):
        if all(record[key] == value for key, value in wanted.items()):
            return record.get("weight_bits", record["bits"]), kl_cell(record)
    raise ValueError(f"{name}.json has no record with {wanted}")


def evidence_front() -> str:
    """Return for each budget of bits the best scheme of weights and activations on the checkpoint as it is, of ours and
    of the papers', and the best on any checkpoint, which only ours were measured on."""
    texts = results_by_text()
    first, *others = texts.values()
    rows = []
    for budget in BUDGETS:
        within = [record for record in of_both_operands(first) if record["bits"] <= budget]
        as_it_is = [record for record in within if record["variant"] == AS_IT_IS]
        of_papers = [record for record in as_it_is if record["name"] in PAPERS]
        row = [f"{budget:g}"]
        for group in (of_papers, as_it_is, within):
            best = min(group, key=lambda record: record["kl"])
            name = f"`{best['name']}`"
            if group is within:
                name = f"{best['variant']}: {name}"
            row += [name, kl_cell(best), *(kl_cell(other.get((best["variant"], best["name"]))) for other in others)]
        rows.append(row)
    losses = [f"KL, {short_text(text)}" for text in texts]
    columns = ["bits at most"]
    for group in ("the papers', as it is", "any scheme, as it is", "any checkpoint"):
        columns += [f"best of {group}", *losses]
    return table(columns, rows)


def evidence_claims() -> str:
    """Return differences of two schemes on each model and text, and whether they hold."""
    model = records("evidence")[0]["model"]
    columns = {f"{model}, {short_text(text)}: KL": results for text, results in results_by_text().items()}
    rows = []
    for claim in CLAIMS:
        row = [claim.text]
        for results in columns.values():
            better = results.get((AS_IT_IS, claim.better))
            worse = results.get((AS_IT_IS, claim.worse))
            verdict = ""
            if better is not None and worse is not None:
                verdict = _verdict(better, worse)
            row.append(verdict)
        rows.append(row)
    return table(["claim", *columns], rows)


def _verdict(better: Record, worse: Record) -> str:
    """Return the difference of two losses, and what its 95 % interval says.

    The two count as measured on different texts, which makes the interval too wide.
    """
    low = better["kl"]
    high = worse["kl"]
    error = 1.96 * math.hypot(better["kl_standard_error"], worse["kl_standard_error"])
    if low + error < high:
        verdict = "holds"
    elif low - error > high:
        verdict = "the other way"
    else:
        verdict = "not told apart"
    return f"{verdict}: {high:.4g} -> {low:.4g} (± {error:.2g})"


def by_scheme(results: Results) -> dict[str, dict[str, Record]]:
    """Return records of `tensor_cores.json` by scheme, then by variant. Rotated schemes are variants here."""
    found: dict[str, dict[str, Record]] = {}
    for (variant, name), record in results.items():
        found.setdefault(name.removesuffix(", H64"), {})[variant] = record
    return found


def tensor_cores() -> str:
    """Return what the schemes of tensor cores lose."""
    return _losses_by_variant("tensor_cores", (AS_IT_IS, SMOOTHED, ROTATED))


def gemma() -> str:
    """Return what schemes lose on Gemma 3 270M."""
    return _losses_by_variant("gemma", (AS_IT_IS, SMOOTHED, ROTATED))


def _losses_by_variant(file: str, variants: tuple[str, ...]) -> str:
    """Return a row for each scheme of a file of records: bits, what multiplies it, and what it loses on variants of the
    checkpoint, by text."""
    texts = results_by_text(file)
    schemes = [by_scheme(results) for results in texts.values()]
    rows = []
    for name, by_variant in schemes[0].items():
        plain = by_variant[AS_IT_IS]
        row = [f"`{name}`", bits_cell(plain["weight_bits"]), *plain["tensor_cores"]]
        for of_text in schemes:
            for variant in variants:
                record = of_text.get(name, {}).get(variant)
                row.append("" if record is None else f"{kl_cell(record)} ({record['value']:.2f})")
        rows.append(row)
    columns = [f"{short_text(text)}, {variant}" for text in texts for variant in variants]
    firsts = [next(iter(results.values())) for results in texts.values()]
    baselines = ", ".join(f"{record['baseline']:.2f}" for record in firsts)
    commands = ", ".join(f"`{record['command']}`" for record in firsts)
    note = (
        f"KL to bfloat16 in nats per token ± the standard error over texts (perplexity; {baselines} in bfloat16); "
        f"{commands}"
    )
    if "converted_from" in firsts[0]:
        note += f"; the checkpoint was {firsts[0]['converted_from']}"
    return f"{table(['scheme', 'bits of a weight', 'Hopper', 'Blackwell', *columns], rows)}\n{note}\n"


def gptq() -> str:
    """Return what weights rounded by GPTQ lose, next to nearest values, smoothed or not."""
    texts = results_by_text()
    first = next(iter(texts.values()))
    rows = []
    for (variant, name), of_first in first.items():
        # On the checkpoint as it is, rotated schemes are left out.
        scheme = name
        if variant != AS_IT_IS:
            scheme = name.removesuffix(", H64")
        if variant not in (AS_IT_IS, SMOOTHED, ROUNDED, ROTATED) or scheme not in (f"w4a16:{OURS}", OURS):
            continue
        row = [variant, f"`{name}`", bits_cell(of_first["bits"])]
        for results in texts.values():
            record = results.get((variant, name))
            row += [kl_cell(record), "" if record is None else f"{record['value']:.2f}"]
        rows.append(row)
    columns = []
    for text in texts:
        columns += [f"KL, {short_text(text)}", "perplexity"]
    return table(["checkpoint", "scheme", "bits", *columns], rows)
