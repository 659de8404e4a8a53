# SPDX-License-Identifier: Apache-2.0
"""Import of other engines' MXFP4 checkpoints as packed ones, bit for bit."""

import json
import os
from pathlib import Path

from ..card.folder import write_packed_card
from ..formats.gguf import is_gguf, open_gguf
from ..io.folder import CheckpointError, model_dtype, open_checkpoint
from ..io.guard import with_scheme
from ..io.validate import RECORD, make_record
from ..io.writer import MAX_SHARD_SIZE
from .conversion import KeptLayer, OnBytes, convert
from .costs import PACKED, ConversionReport
from .other_tensors import packed_model_tensors
from .sources import NOT_IMPORTED, ForeignSource, importable


def import_checkpoint(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = lambda count, name: None,
) -> ConversionReport:
    """Write a compressed-tensors `mxfp4-pack-quantized`, a Quark MXFP4 or a gpt-oss checkpoint, or a GGUF file with
    MXFP4 tensors, as a packed one of this package.

    Codes and scales keep their values. Layers that are not quantized there become `modules_to_not_convert`. Of a GGUF
    file the model's `config.json` and tokenizer are taken from beside it, or else from its metadata.

    Raises:
        CheckpointError: the format is another one, or has something this package has no equal of: other elements or
            group sizes (NVFP4), column orders, other activation quantization, quantized heads, routers or experts.
        FolderError: ``out_dir`` cannot be written.
        ShardError: a file is missing or damaged.
    """
    folder = open_gguf(source_dir) if is_gguf(source_dir) else open_checkpoint(source_dir)
    method = folder.quantization.get("quant_method")
    known = importable()
    if str(method) not in known:
        what = f"is quantized by {method!r}; {NOT_IMPORTED}"
        if not method:
            what = "is not quantized; there is nothing to import, use hf-mxfp4 pack or export on it"
        raise CheckpointError(f"{folder.path} {what}")
    source = ForeignSource(folder, known[method])
    sqnr_db = _recorded_sqnr(source)
    return convert(
        source,
        out_dir,
        {layer: KeptLayer(source, layer) for layer in source.shapes},
        source.format.restored(packed_model_tensors(source), model_dtype(folder)),
        with_scheme(folder.config, source.config),
        ConversionReport(
            Path(out_dir),
            "mxfp4_rl",
            source.config.describe(),
            notes=source.notes,
            against=PACKED,
            source_sqnr_db=sqnr_db,
        ),
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        on_bytes=on_bytes,
        metadata=make_record(source.config, sqnr_db),
        finish=lambda new: write_packed_card(source, sqnr_db, new, existing=out_dir),
    )


def _recorded_sqnr(source: ForeignSource) -> float | None:
    """The weights' SQNR in decibels, if this package exported them and all files agree on what was recorded."""
    records = source.folder.header_texts(RECORD)
    record = records.pop()
    if records or record is None:
        return None
    sqnr_db = json.loads(record).get("weight_sqnr_db")
    return sqnr_db if make_record(source.config, sqnr_db) == {RECORD: record} else None
