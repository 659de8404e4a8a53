# SPDX-License-Identifier: Apache-2.0
"""The sections of a generated model card, in Markdown."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ...config import MXFP4RLConfig
from ...numerics import PLAIN, OperandScheme, QuantScheme, decompose_scheme
from ...presets import ALL_OPERANDS
from ...report import QuantizationReport
from ...stats import share_text
from .auto_class import auto_class


if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Stands for the repository or folder until its name is known.
HERE = "<this repository or folder>"
NO_EVALUATION = "No evaluation came with these weights: nothing is claimed about their quality on any task."
_EVALUATION = re.compile(r"(?<=## Evaluation\n\n).*?(?=\n\n## |\Z)", re.DOTALL)
_PERPLEXITY_TITLE = "## Perplexity\n\n"
_PERPLEXITY = re.compile(r"## Perplexity\n\n.*?\n\n(?=## )", re.DOTALL)
#: Rows of an evaluation that are of the checkpoint as it is: master weights under their own scheme, or stored ones.
_OWN_ROWS = ("own", "as stored")
_ERROR_TITLE = "## Quantization error of the weights\n\n"
_EXPERT = re.compile(r"\.experts\.\d+\.")
#: Rows of a weight that the error is measured on, evenly spaced: enough for two digits, and cheap at every checkpoint.
_ROWS = 64
#: How the package that loads a checkpoint is installed.
INSTALLATION = "install it from a clone of its repository, with `pip install .` in that folder"


@dataclass(frozen=True)
class Subject:
    """What a card is about.

    Attributes:
        architecture: the class of the model.
        source: Hub name or folder that the weights came from; may be empty.
        packed_sqnr_db: of packed weights, measured when they were packed, in decibels; `None` where it was not.
        errors: of trainable weights, see [`weight_errors`].
    """

    architecture: str
    config: MXFP4RLConfig
    report: QuantizationReport
    source: str
    packed_sqnr_db: float | None = None
    errors: dict[str, float] | str | None = None


def card_text(subject: Subject) -> str:
    """Return everything of a card below its metadata."""
    packed = subject.config.mode == "packed"
    experts = any(_EXPERT.search(name) for name in subject.report.quantized)
    what = "Linear layers and experts" if experts else "Linear layers"
    kind = "packed 4-bit weights" if packed else "full-precision master weights, quantized as the model computes"
    return "\n\n".join(
        [
            f"# {subject.architecture} in MXFP4",
            f"{what} in MXFP4 (blocks of 32 E2M1 values under an E8M0 scale), by hf-mxfp4: {kind}.",
            _loading(subject.architecture, packed),
            _scheme(subject.config, subject.report),
            _packed_error(subject.packed_sqnr_db) if packed else _errors(subject.errors),
            f"## Evaluation\n\n{NO_EVALUATION}",
            unmeasured(),
        ]
    )


def evaluation_section(summary: Mapping[str, Any]) -> str:
    """The text of the section on evaluation, from a `summary.json` of `recipes/grpo.py`."""

    def accuracy(when: str, name: str) -> str:
        return share_text(summary[f"accuracy_{when}"][name], summary["n_test"])

    rows = [f"| {n} | {accuracy('before', n)} | {accuracy('after', n)} |" for n in summary["accuracy_after"]]
    return "\n".join(
        [
            f"Greedy accuracy on {summary['n_test']} held-out problems of `{summary['task']}` (in brackets the "
            f"95 % interval), before and after {summary['steps']} steps of GRPO, seed {summary['seed']}, both under "
            f"the scheme {summary['scheme']}. One run: it says nothing about other seeds.",
            "",
            "| score | before RL | after RL |",
            "|---|---|---|",
            *rows,
        ]
    )


def replace_evaluation(body: str, section: str) -> str:
    return _EVALUATION.sub(lambda _: section, body, count=1)


def perplexity_section(evaluation: Mapping[str, Any]) -> str:
    """The text of the section on perplexity, from an `evaluation.json` of `hf-mxfp4 eval`.

    Raises `ValueError` when it has no row of the checkpoint's own scheme.
    """
    rows = {row["name"]: row for row in evaluation["rows"]}
    own = next((rows[name] for name in _OWN_ROWS if name in rows), None)
    if own is None:
        raise ValueError(
            f"the evaluation has {', '.join(rows)}, none of which is the checkpoint's own scheme; run hf-mxfp4 eval "
            "with --scheme own"
        )
    base = rows.get(evaluation["reference"])
    cells = {"perplexity": f"{own['perplexity']:.3f}"}
    if base is not None and base is not own:
        name = "full precision (the master weights)" if base["name"] == "full precision" else f"`{base['name']}`"
        cells |= {
            f"perplexity of {name}": f"{base['perplexity']:.3f}",
            "difference, nats per token": _with_error(own["difference"], 3, "+"),
            "KL to it, nats per token": _with_error(own["kl"], 4),
            "same likeliest token": f"{100 * own['same_top']:.1f} %",
        }
    table = "\n".join(f"| {name} | {value} |" for name, value in cells.items())
    return (
        f"On {evaluation['texts']} texts of `{evaluation['text']}`, {evaluation['tokens']} predicted tokens, in "
        f"{evaluation['dtype']} (`hf-mxfp4 eval`; ± standard errors by text).\n\n| | |\n|---|---|\n{table}"
    )


def replace_perplexity(body: str, section: str) -> str:
    """A card's text with a section on perplexity, before that on evaluation."""
    body = _PERPLEXITY.sub("", body, count=1)
    before, title, after = body.partition("## Evaluation\n\n")
    return f"{before}{_PERPLEXITY_TITLE}{section}\n\n{title}{after}"


def _with_error(mean: Mapping[str, float | None], digits: int, sign: str = "") -> str:
    error = "" if mean["standard_error"] is None else f" ± {mean['standard_error']:.{digits}f}"
    return f"{mean['value']:{sign}.{digits}f}{error}"


def _loading(architecture: str, packed: bool) -> str:
    auto = auto_class(architecture)
    without = (
        "Without it the files cannot be loaded."
        if packed
        else "Without it transformers warns and loads the master weights in full precision."
    )
    return (
        "## How to load\n\n```python\nimport hf_mxfp4  # registers the quantization method mxfp4_rl\n"
        f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("{HERE}")\n```\n\n'
        f"hf-mxfp4 has no release yet: {INSTALLATION}. The import applies the scheme below. {without}"
    )


def code(text: str) -> str:
    """Return text as code within a cell of a table, whatever is in it."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`".replace("|", "\\|")


def _operand(scheme: OperandScheme) -> str:
    return f"`{scheme}`" if isinstance(scheme, QuantScheme) else str(scheme)


def _scheme(config: MXFP4RLConfig, report: QuantizationReport) -> str:
    scheme = config.gemms()
    everything = dict.fromkeys(ALL_OPERANDS, "all operands of the three products")
    operands = {"w4a16": "weights alone", **everything}.get(config.preset, "weights and activations")
    rows = {
        "mode": f"`{config.mode}`",
        "preset": f"`{config.preset}`: {operands} in MXFP4",
        "weights": _operand(scheme.fprop.right),
        "activations": _operand(scheme.fprop.left),
        "rows x columns per weight scale": config.weight_block,
    }
    if scheme.fprop.rotation is not None:
        rows["rotation of the forward product"] = f"`{scheme.fprop.rotation}`"
    for gemm, product in (("dgrad", scheme.dgrad), ("wgrad", scheme.wgrad)):
        if product != PLAIN:
            rows[f"backward product {gemm}"] = scheme.describe(gemm)
    rows["quantized layers"] = str(report.n_quantized)
    n_experts = sum(_EXPERT.search(name) is not None for name in report.quantized)
    if n_experts:
        rows["of these in experts, one for each projection of each"] = str(n_experts)
    left = f" ({', '.join(report.skipped)})" if 0 < report.n_skipped <= 4 else ""
    rows["linear layers left alone"] = f"{report.n_skipped}{left}"
    if report.bits_per_weight is not None:
        rows["bits per quantized weight"] = f"{report.bits_per_weight:.4g}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"## Scheme\n\n| | |\n|---|---|\n{table}"


def _packed_error(sqnr_db: float | None) -> str:
    if sqnr_db is None:
        return f"{_ERROR_TITLE}Not measured: the weights before packing were not at hand."
    return (
        f"{_ERROR_TITLE}Signal to quantization noise ratio {_number(sqnr_db)} dB, measured when the weights were "
        "packed, against what was packed (evenly spaced rows of every layer). The components of the error were not "
        "recorded."
    )


def _errors(sums: dict[str, float] | str) -> str:
    if isinstance(sums, str):
        return f"{_ERROR_TITLE}Not measured: {sums}."
    ratio = {part: sums[part] / sums["error"] for part in ("scale_bias", "deadzone", "grid")}
    cosine = sums["scale_dot_grid"] / (math.sqrt(sums["scale_bias"] * sums["grid"]) or math.nan)
    rows = {
        "signal to quantization noise ratio": f"{_number(10 * math.log10(sums['weight'] / sums['error']))} dB",
        "relative squared error": f"{100 * sums['error'] / sums['weight']:.3f} %",
        "scale bias, energy over that of the error": f"{ratio['scale_bias']:.3f}",
        "deadzone truncation, likewise": f"{ratio['deadzone']:.3f}",
        "grid noise, likewise": f"{ratio['grid']:.3f}",
        "cosine of scale bias and grid noise": f"{cosine:.3f}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"{_ERROR_TITLE}Measured on these master weights, on at most {_ROWS} evenly spaced rows of every quantized "
        f"layer.\n\n| | |\n|---|---|\n{table}\n\n"
        "Scale bias and grid noise are not orthogonal, so each can exceed 1 "
        "([arXiv 2605.20402](https://arxiv.org/abs/2605.20402) defines the components)."
    )


def unmeasured() -> str:
    """Return the section on what nobody measured, and what wrote the card."""
    import hf_mxfp4

    return (
        "## Not measured\n\nThe error of quantized activations on real data, speed, memory in use, and how the model "
        "behaves in other engines. Biases, licence terms and intended uses are those of the base model; nothing about "
        f"them was checked.\n\nWritten by hf_mxfp4 {hf_mxfp4.__version__} with transformers {transformers.__version__}."
    )


def weight_errors(
    model: "PreTrainedModel", state_dict: Mapping[str, torch.Tensor] | None = None
) -> dict[str, float] | str:
    """Energies of the master weights of all quantized layers, of their error and of its components, and the dot product
    of scale bias and grid noise, all on sampled rows; or why there are none, in words."""
    sums = dict.fromkeys(("weight", "error", "scale_bias", "deadzone", "grid", "scale_dot_grid"), 0.0)
    for matrix in model.hf_quantizer.matrices(model):
        name = matrix.full_name.replace(".base_layer.", ".")  # below an adapter
        value = (state_dict or {}).get(name, getattr(matrix.layer, matrix.parameter)).detach()
        if type(value) is not torch.Tensor or value.is_meta or value.dim() != (2 if matrix.expert is None else 3):
            return "the weights were spread over several devices when they were saved"
        if matrix.layer.config.weights_alone_unsupported_reason:
            return matrix.layer.config.weights_alone_unsupported_reason
        scheme = matrix.layer.config.weight_scheme
        rows = _sample(matrix.of(value), scheme.block_rows, matrix.siblings)
        if not rows.isfinite().all():
            return f"{name} holds NaN or infinity"
        parts = decompose_scheme(rows, scheme)
        named = {
            "weight": rows.double(),
            "error": parts.scale_bias + parts.deadzone + parts.grid,
            "scale_bias": parts.scale_bias,
            "deadzone": parts.deadzone,
            "grid": parts.grid,
        }
        for part, values in named.items():
            sums[part] += values.square().sum().item()
        sums["scale_dot_grid"] += (parts.scale_bias * parts.grid).sum().item()
    if not sums["error"]:
        return (
            "all weights are zero" if not sums["weight"] else "the weights lie on the grid already; there is no error"
        )
    return sums


def _sample(weight: torch.Tensor, band: int, siblings: int = 1) -> torch.Tensor:
    """At most 64 rows, of one of ``siblings`` as many less but at least one, as evenly spaced bands of ``band`` rows
    that share block scales."""
    starts = range(0, weight.shape[0], band * math.ceil(weight.shape[0] * siblings / _ROWS))
    return weight[:: starts.step] if band == 1 else torch.cat([weight[start : start + band] for start in starts])


def _number(decibels: float) -> str:
    return "∞" if math.isinf(decibels) else f"{decibels:.2f}"
