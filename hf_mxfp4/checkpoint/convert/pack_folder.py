# SPDX-License-Identifier: Apache-2.0
"""From a full-precision checkpoint to a packed one without loading the model."""

import os
from pathlib import Path

import torch

from ...config import MXFP4RLConfig
from ...gemm import weight_values
from ...module_names import full_precision_record, skip_reasons
from ...report import ErrorEnergy, add_packed
from ..card.folder import write_packed_card
from ..io.folder import open_checkpoint
from ..io.guard import with_scheme
from ..io.validate import WIDEST_FLOAT, make_record
from ..io.writer import MAX_SHARD_SIZE, TensorStream
from .conversion import LayerWriter, OnBytes, convert
from .costs import ConversionReport, LayerCost
from .other_tensors import packed_model_tensors
from .sources import MasterSource
from .stored_weights import packed_names, packed_specs


#: Rows of a weight that are compared with their packed values at a time.
_ROWS = 1024
#: The report in the new folder.
REPORT = "pack_report.json"


def pack_checkpoint(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    config: MXFP4RLConfig | None = None,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = lambda count, name: None,
) -> ConversionReport:
    """Write the packed checkpoint that `hf_mxfp4.pack(model).save_pretrained` would, model card included, one matrix in
    memory at a time (of experts that files keep in one tensor too).

    Args:
        source_dir: a checkpoint trained with ``mode="qat"``, or a plain one.
        out_dir: new or empty folder; with ``overwrite`` also a checkpoint, which is replaced.
        config: of mode ``"packed"``, for a plain checkpoint; a QAT one is packed under its own scheme.

    Returns:
        The SQNR of every packed weight against the full-precision one, which is also in `pack_report.json` in the
        folder.

    Raises:
        CheckpointError: the checkpoint cannot be read, is packed already, or has no scheme and got none, or both.
        FolderError: ``out_dir`` cannot be written.
        ShardError: a file is missing or damaged.
    """
    folder = open_checkpoint(source_dir)
    source = MasterSource(folder, config)
    energy = ErrorEnergy()
    reasons = skip_reasons(source.model, source.config.modules_to_not_convert or ())
    config_saved = source.config.keeping(full_precision_record(source.model, reasons))
    return convert(
        source,
        out_dir,
        {layer: _PackedLayer(source, layer, energy) for layer in source.shapes},
        packed_model_tensors(source),
        with_scheme(folder.config, config_saved),
        ConversionReport(Path(out_dir), "mxfp4_rl", source.config.describe(), weights=str(source.config.weight_scheme)),
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        on_bytes=on_bytes,
        report_file=REPORT,
        metadata=make_record(source.config, WIDEST_FLOAT),
        final_metadata=lambda: make_record(source.config, energy.sqnr_db),
        finish=lambda new: write_packed_card(source, energy.sqnr_db, new, existing=out_dir),
    )


class _PackedLayer(LayerWriter):
    def __init__(self, source: MasterSource, layer: str, energy: ErrorEnergy):
        self._source, self._layer, self._energy = source, layer, energy
        self._name = source.in_packed_files(layer)
        self.specs = packed_specs(self._name, source.shapes[layer], source.config)

    def write(self, writer: TensorStream) -> LayerCost:
        config, shape = self._source.config, self._source.shapes[self._layer]
        names = packed_names(self._name, shape, config)
        cost = LayerCost(self._layer, "packed", matrices=shape.n_matrices)
        for expert in shape.matrices:
            master = self._source.master(self._layer, expert)
            packed = self._source.pack(master)
            for field, tensor in packed.items():
                writer.append(names[field], tensor)
            add_packed(self._energy, master, packed, config, shape.n_matrices)
            for start in range(0, master.shape[0], _ROWS):
                rows = master[start : start + _ROWS]
                some = {field: tensor[start : start + _ROWS] for field, tensor in packed.items()}
                options = config.weight_scheme, torch.float32, "auto", config.weight_rotation
                cost.add(rows, weight_values(some, master.shape[1], *options))
        return cost
