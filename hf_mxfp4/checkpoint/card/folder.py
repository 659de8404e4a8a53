# SPDX-License-Identifier: Apache-2.0
"""The model card of a packed checkpoint that was written without a model in memory."""

import os
from pathlib import Path

from torch import nn

from ...experts_layout import matrix_names
from ...module_names import find_layers
from ...report import QuantizationReport
from ..convert.sources import LayerSource
from ..convert.stored_weights import packed_specs, quantizable_layers
from .model import decoration, write_card
from .sections import Subject


def write_packed_card(source: LayerSource, sqnr_db: float | None, folder: Path, *, existing: str | os.PathLike) -> None:
    """Write into ``folder`` the card that the model would have saved, had it been loaded and packed.

    Args:
        source: what was packed.
        sqnr_db: what was measured of the weights as they were packed, in decibels.
        existing: the folder whose place is taken; a card there that somebody wrote is kept.
    """
    with decoration():
        write_card(packed_subject(source, sqnr_db), folder, existing=existing)


def packed_subject(source: LayerSource, sqnr_db: float | None) -> Subject:
    """Return what the card of a packed folder is about."""
    model, config = source.model, source.config
    names = [
        name
        for place, layer in quantizable_layers(model, config).items()
        for name in ([place] if isinstance(layer, nn.Linear) else matrix_names(place, layer))
    ]
    specs = [spec for layer, shape in source.shapes.items() for spec in packed_specs(layer, shape, config).values()]
    report = QuantizationReport(
        scheme=config.describe(),
        quantized=tuple(names),
        skipped=tuple(find_layers(model, config.modules_to_not_convert or ())[1]),
        sqnr_db=sqnr_db,
        n_weights=sum(shape.n_weights for shape in source.shapes.values()),
        packed_bytes=sum(spec.nbytes for spec in specs),
    )
    return Subject(type(model).__name__, config, report, str(source.folder.path), sqnr_db)
