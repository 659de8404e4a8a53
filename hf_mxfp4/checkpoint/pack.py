# SPDX-License-Identifier: Apache-2.0
"""Packing of a full-precision checkpoint, and import of other engines' MXFP4 checkpoints, without loading the model."""

import os
from pathlib import Path

import torch

from ..config import MXFP4RLConfig
from ..gemm import weight_values
from ..module_names import full_precision_record, skip_reasons
from ..report import ErrorEnergy, add_packed
from .card import write_packed_card
from .conversion import convert
from .folder import CheckpointError, open_checkpoint
from .layers import stack_packed
from .manifest import OnBytes, ignore_bytes
from .report import PACKED, ConversionReport, LayerCost
from .scheme import WIDEST_FLOAT, make_record, with_scheme
from .sources import NOT_IMPORTED, ForeignSource, MasterSource, importable
from .tensors import MAX_SHARD_SIZE


def pack_checkpoint(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    config: MXFP4RLConfig | None = None,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = ignore_bytes,
) -> ConversionReport:
    """Write the packed checkpoint that `hf_mxfp4.pack(model).save_pretrained` would, model card included, without
    loading the model: one layer and one output shard are in memory.

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
    config, energy = source.config, ErrorEnergy()
    costs = {layer: LayerCost(layer, "packed") for layer in source.shapes}

    def pack(layer: str) -> dict[str, torch.Tensor]:
        shape, packed = source.shapes[layer], []
        for expert in shape.matrices:
            master = source.master(layer, expert)
            packed.append(source.pack(master))
            add_packed(energy, master, packed[-1], config, shape.n_matrices)
            options = config.weight_scheme, torch.float32, "auto", config.weight_rotation
            costs[layer].add(master, weight_values(packed[-1], master.shape[1], *options))
        return stack_packed(shape, packed)

    reasons = skip_reasons(source.model, config.modules_to_not_convert or ())
    saved = config.keeping(full_precision_record(source.model, reasons))
    return convert(
        source,
        out_dir,
        {layer: (source.packed_layer(layer, pack), cost) for layer, cost in costs.items()},
        source.packed_rest(),
        with_scheme(folder.config, saved),
        ConversionReport(
            Path(out_dir), "mxfp4_rl", config.describe(), weights=str(config.weight_scheme), file="pack_report.json"
        ),
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        on_bytes=on_bytes,
        metadata=make_record(config, WIDEST_FLOAT),
        final_metadata=lambda: make_record(config, energy.sqnr_db),
        finish=lambda new: write_packed_card(source, energy.sqnr_db, new, existing=out_dir),
    )


def import_checkpoint(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = ignore_bytes,
) -> ConversionReport:
    """Write a compressed-tensors `mxfp4-pack-quantized`, a Quark MXFP4 or a gpt-oss checkpoint as a packed one of this
    package.

    Codes and scales keep their values. Layers that are not quantized there become `modules_to_not_convert`.

    Raises:
        CheckpointError: the format is another one, or has something this package has no equal of: other elements or
            group sizes (NVFP4), column orders, other activation quantization, quantized heads, routers or experts.
        FolderError: ``out_dir`` cannot be written.
        ShardError: a file is missing or damaged.
    """
    if (path := Path(source_dir)).suffix == ".gguf" or any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path} is GGUF, which is not imported; use the checkpoint that it was made from, or load it in full "
            "precision with from_pretrained(FOLDER, gguf_file=FILE) and save it"
        )
    folder = open_checkpoint(source_dir)
    method = folder.quantization.get("quant_method")
    known = importable()
    if str(method) not in known:
        what = f"is quantized by {method!r}; {NOT_IMPORTED}"
        if not method:
            what = "is not quantized; there is nothing to import, use hf-mxfp4 pack or export on it"
        raise CheckpointError(f"{folder.path} {what}")
    source = ForeignSource(folder, known[method])

    def keep(layer: str) -> dict[str, torch.Tensor]:
        shape = source.shapes[layer]
        return stack_packed(shape, [source.read(layer, expert) for expert in shape.matrices])

    report = ConversionReport(
        Path(out_dir),
        "mxfp4_rl",
        source.config.describe(),
        notes=source.notes,
        against=PACKED,
    )
    return convert(
        source,
        out_dir,
        {layer: (source.packed_layer(layer, keep), LayerCost(layer, "kept")) for layer in source.shapes},
        source.packed_rest(),
        with_scheme(folder.config, source.config),
        report,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        on_bytes=on_bytes,
        metadata=make_record(source.config, None),
        finish=lambda new: write_packed_card(source, None, new, existing=out_dir),
    )
