# SPDX-License-Identifier: Apache-2.0
"""The model card of a checkpoint in another engine's format, for formats that say how their files are run."""

import os
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ...module_names import find_layers
from ..convert.costs import ConversionReport, bits_per_weight
from ..convert.sources import LayerSource
from .auto_class import pipeline_tag
from .model import TAGS, base_model_of, decoration, keep_or_save, signed_card
from .sections import NO_EVALUATION, unmeasured


#: What was done to layers, in the report's words -> in those of the card.
_ACTIONS = {
    "kept": "with the bytes of a packed checkpoint",
    "packed": "quantized once, from full precision",
    "requantized": "quantized a second time",
    "dequantized": "dequantized to bfloat16",
    "left": "left in bfloat16",
}


def write_export_card(
    source: LayerSource, report: ConversionReport, how_to_run: str, folder: Path, *, existing: str | os.PathLike
) -> None:
    """Write a card into ``folder``, the new one of ``report``, or copy that of ``existing`` that somebody wrote.

    Args:
        source: what was exported.
        how_to_run: Markdown.
    """
    with decoration():
        keep_or_save(_export_card(source, report, how_to_run), folder, existing=existing)


def _export_card(source: LayerSource, report: ConversionReport, how_to_run: str) -> ModelCard:
    base_model = base_model_of(str(source.folder.path))
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="quantized" if base_model else None,
        library_name=report.format,
        pipeline_tag=pipeline_tag(type(source.model).__name__),
        tags=[*TAGS, report.format],
    )
    sections = [
        f"# {type(source.model).__name__} in MXFP4, {report.format.upper()}",
        "Layers in MXFP4 (blocks of 32 E2M1 values under an E8M0 scale), by hf-mxfp4.",
        f"## How to run\n\n{how_to_run}",
        f"## Scheme\n\n{_scheme(source, report)}",
        f"## Quantization error of the weights\n\n{_sentence(report.error())}",
        f"## Evaluation\n\n{NO_EVALUATION}",
        unmeasured(),
    ]
    return signed_card(data, "\n\n".join(sections))


def _scheme(source: LayerSource, report: ConversionReport) -> str:
    rows = {"weights": f"`{report.weights or source.config.weight_scheme}`"}
    rows |= {f"layers {_ACTIONS[action]}": count for action, count in report.counts().items()}
    rows["other linear layers, in 16 bits or more"] = len(_left_alone(source))
    rows["bits per weight of the layers"] = f"{bits_per_weight(report.layers):.4g}"
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _left_alone(source: LayerSource) -> list[str]:
    return find_layers(source.model, source.config.modules_to_not_convert or ())[1]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
