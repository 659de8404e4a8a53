# SPDX-License-Identifier: Apache-2.0
"""The sections of generated model cards, in Markdown."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from ..config import MXFP4RLConfig
from ..numerics import PLAIN, OperandScheme, QuantScheme
from ..presets import ALL_OPERANDS
from ..report import QuantizationReport
from ..utils import share_text


#: Stands for the repository or folder until its name is known.
HERE = "<this repository or folder>"
NO_EVALUATION = "No evaluation came with these weights: nothing is claimed about their quality on any task."
#: How the package that loads a checkpoint is installed.
INSTALLATION = "install it from a clone of its repository, with `pip install .` in that folder"
_EVALUATION = re.compile(r"(?<=## Evaluation\n\n).*?(?=\n\n## |\Z)", re.DOTALL)
_PERPLEXITY = re.compile(r"## Perplexity\n\n.*?\n\n(?=## )", re.DOTALL)
#: Rows of an evaluation of the checkpoint as it is: master weights under their own scheme, or stored ones.
_OWN_ROWS = ("own", "as stored")
_EXPERT = re.compile(r"\.experts\.\d+\.")
#: Auto classes, searched in this order because a class can be in several tables -> the Hub's tag of the task.
_TASKS = {
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForSeq2SeqLM": "text-generation",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModel": None,
}


@dataclass(frozen=True)
class Subject:
    """What the card of one of our checkpoints is about.

    Attributes:
        architecture: the class of the model.
        source: Hub name or folder that the weights came from; may be empty.
        sqnr_db: SQNR of the weights in decibels; `None` if it was not measured.
    """

    architecture: str
    config: MXFP4RLConfig
    report: QuantizationReport
    source: str
    sqnr_db: float | None = None

    @property
    def is_packed(self) -> bool:
        return self.config.mode == "packed"


def auto_class(architecture: str) -> str:
    """Return the name of the auto class that makes an ``architecture`` with its head, or of the class itself."""
    for name in _TASKS:
        table = getattr(modeling_auto, name)._model_mapping._model_mapping
        if any(architecture in ([entry] if isinstance(entry, str) else entry) for entry in table.values()):
            return name
    if hasattr(transformers, architecture):
        return architecture
    head = f"AutoModelFor{architecture.rpartition('For')[2]}"
    return head if hasattr(modeling_auto, head) else "AutoModel"


def pipeline_tag(architecture: str) -> str | None:
    """Return the Hub's name of the task of an ``architecture``, if it is one of the usual ones."""
    return _TASKS.get(auto_class(architecture))


def table(rows: Mapping[str, Any]) -> str:
    """Return a table of two columns."""
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def code(text: str) -> str:
    """Return text as code within a cell of a table."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`".replace("|", "\\|")


def card_text(subject: Subject) -> str:
    """Return everything of a card below its metadata."""
    import hf_mxfp4

    experts = any(_EXPERT.search(name) for name in subject.report.quantized)
    what = "Linear layers and experts" if experts else "Linear layers"
    kind = "packed 4-bit weights" if subject.is_packed else "full-precision master weights, quantized during forward"
    return "\n\n".join(
        [
            f"# {subject.architecture} in MXFP4",
            f"{what} in MXFP4 (blocks of 32 E2M1 values under an E8M0 scale), by hf-mxfp4: {kind}.",
            f"## How to load\n\n{_loading(subject)}",
            f"## Scheme\n\n{table(_scheme(subject.config, subject.report))}",
            f"## Quantization error of the weights\n\n{_error(subject)}",
            f"## Evaluation\n\n{NO_EVALUATION}",
            "## Not measured\n\nThe error of quantized activations on real data, speed, memory in use, and how the "
            "model behaves in other engines. Biases, licence terms and intended uses are those of the base model; they "
            f"were not checked.\n\nWritten by hf_mxfp4 {hf_mxfp4.__version__} with transformers "
            f"{transformers.__version__}.",
        ]
    )


def _loading(subject: Subject) -> str:
    auto = auto_class(subject.architecture)
    without = (
        "Without it the files cannot be loaded."
        if subject.is_packed
        else "Without it transformers warns and loads the master weights in full precision."
    )
    return (
        f"```python\nimport hf_mxfp4  # registers the quantization method mxfp4_rl\nfrom transformers import {auto}\n\n"
        f'model = {auto}.from_pretrained("{HERE}")\n```\n\n'
        f"hf-mxfp4 has no release yet: {INSTALLATION}. The import applies the scheme below. {without}"
    )


def _operand(scheme: OperandScheme) -> str:
    return f"`{scheme}`" if isinstance(scheme, QuantScheme) else str(scheme)


def _scheme(config: MXFP4RLConfig, report: QuantizationReport) -> dict[str, Any]:
    scheme = config.gemms()
    everything = dict.fromkeys(ALL_OPERANDS, "all operands of the three products")
    operands = {"w4a16": "weights only", **everything}.get(config.preset, "weights and activations")
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
    rows["quantized layers"] = report.n_quantized
    if n_experts := sum(_EXPERT.search(name) is not None for name in report.quantized):
        rows["of these in experts, one for each projection of each"] = n_experts
    left = f" ({', '.join(report.skipped)})" if 0 < report.n_skipped <= 4 else ""
    rows["linear layers in full precision"] = f"{report.n_skipped}{left}"
    if report.bits_per_weight is not None:
        rows["bits per quantized weight"] = f"{report.bits_per_weight:.4g}"
    return rows


def _error(subject: Subject) -> str:
    if subject.sqnr_db is None or math.isnan(subject.sqnr_db):
        return "Not measured."
    number = "∞" if math.isinf(subject.sqnr_db) else f"{subject.sqnr_db:.2f}"
    when = "when the weights were packed, against what was packed" if subject.is_packed else "on these master weights"
    return f"Signal to quantization noise ratio {number} dB, measured {when} (evenly spaced rows of every layer)."


def with_evaluation(body: str, summary: Mapping[str, Any]) -> str:
    """Return a card's text with the accuracies of a `summary.json` of `recipes/grpo.py`."""

    def accuracy(when: str, name: str) -> str:
        return share_text(summary[f"accuracy_{when}"][name], summary["n_test"])

    rows = [f"| {n} | {accuracy('before', n)} | {accuracy('after', n)} |" for n in summary["accuracy_after"]]
    section = "\n".join(
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
    return _EVALUATION.sub(lambda _: section, body, count=1)


def with_perplexity(body: str, evaluation: Mapping[str, Any]) -> str:
    """Return a card's text with a section on perplexity, from an `evaluation.json` of `hf-mxfp4 eval`.

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
    section = (
        f"## Perplexity\n\nOn {evaluation['texts']} texts of `{evaluation['text']}`, {evaluation['tokens']} predicted "
        f"tokens, in {evaluation['dtype']} (`hf-mxfp4 eval`; ± standard errors by text).\n\n{table(cells)}\n\n"
    )
    before, title, after = _PERPLEXITY.sub("", body, count=1).partition("## Evaluation\n\n")
    return f"{before}{section}{title}{after}"


def _with_error(mean: Mapping[str, float | None], digits: int, sign: str = "") -> str:
    error = "" if mean["standard_error"] is None else f" ± {mean['standard_error']:.{digits}f}"
    return f"{mean['value']:{sign}.{digits}f}{error}"
