# SPDX-License-Identifier: Apache-2.0
"""Conversions of checkpoint folders without loading the model: packing of a full-precision one, import of other
engines' MXFP4 checkpoints, and what they share with [`exports`]."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..config import MXFP4RLConfig
from ..files import json_clean, write_json
from ..model.layer_names import full_precision_record
from ..numerics import BLOCK_SIZE, ErrorEnergy
from ..numerics.formats import E8M0_NAN
from ..numerics.schemes import one_of
from ..ops import not_finite, quantize_weight, weight_values
from ..report import add_packed, weight_sqnr
from .card import save_packed_card
from .folder import (
    CheckpointError,
    NewTensor,
    cast_tensors,
    model_dtype,
    open_checkpoint,
    write_metadata,
    write_shards,
)
from .formats import IMPORTABLE, TensorScaleFormat, stored_format
from .manifest import OnBytes, ignore_bytes, weight_files, write_manifest
from .names import stack_packed
from .save import FolderError, atomic_folder, writing_to
from .scheme import WIDEST_FLOAT, make_record, with_scheme
from .side_files import copy_side_files, find_side_files
from .sources import NOT_IMPORTED, ForeignSource, LayerSource, MasterSource


#: What can be done to a layer, and what that is called in sentences.
ACTIONS = {
    "kept": "kept byte for byte",
    "requantized": "quantized again",
    "dequantized": "dequantized",
    "packed": "quantized from full precision",
    "left": "left in full precision",
}
#: Dtypes that tensors which are not quantized can be written in.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: What an error is measured against: full-precision weights that were read, or the values of packed ones.
ORIGINAL = "the full-precision weights"
PACKED = "the packed values"


@dataclass
class LayerCost(ErrorEnergy):
    """What was done to one weight, that of a linear layer or of all experts of a layer.

    Attributes:
        action, reason: one of [`ACTIONS`], and why, if it was not the user's choice for all layers.
        signal, noise: energies of the values before, and of their change.
        bytes_before, bytes_after: size of its tensors in the files read and written, biases not counted.
        blocks, exact_blocks: of 32 elements, whose scales the format stores otherwise, and those of the same values.
    """

    name: str
    action: str
    reason: str | None = None
    matrices: int = 1
    n_weights: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    blocks: int = 0
    exact_blocks: int = 0

    def count(self, packed: torch.Tensor, stored: torch.Tensor) -> None:
        """Count the blocks of a quantized matrix ``[N, K]`` and those that have the same values as they are stored."""
        # NaN in the weights stays NaN, though it equals nothing.
        is_same = (packed == stored) | (packed.isnan() & stored.isnan())
        is_same_block = is_same.unflatten(1, (-1, BLOCK_SIZE)).all(dim=-1)
        self.blocks += is_same_block.numel()
        self.exact_blocks += int(is_same_block.sum())

    @property
    def sqnr_db(self) -> float:
        """Signal to noise in decibels; infinite when nothing changed."""
        return sqnr_db([self])


def sqnr_db(costs: Sequence[LayerCost]) -> float:
    """Return signal to noise of several layers in decibels, energies summed; infinite when nothing changed."""
    total = ErrorEnergy.total(costs)
    return total.sqnr_db if total.noise else math.inf


def bits_per_weight(costs: Sequence[LayerCost], when: str = "after") -> float | None:
    """Return bits in the files per element of some layers, ``"before"`` or ``"after"``; `None` without elements."""
    n_weights = sum(cost.n_weights for cost in costs)
    if not n_weights:
        return None
    n_bytes = sum(getattr(cost, f"bytes_{when}") for cost in costs)
    return 8 * n_bytes / n_weights


@dataclass
class ConversionReport:
    """What a conversion wrote.

    Attributes:
        path, file: the folder, and the name of the file in it that holds this report.
        format: of the checkpoint written; ``"mxfp4_rl"`` is our own packed one.
        scheme, weights: of the checkpoint read, one line, and of the weights written, if it differs.
        notes: what else is different, in sentences.
        against: [`ORIGINAL`] or [`PACKED`], what errors are measured against.
        source_sqnr_db: of a packed checkpoint that was read, the recorded SQNR of its values against what was packed.
        bytes_before, bytes_after: all tensors in the files read and written.
        serve: the command that serves the folder.
    """

    path: Path
    format: str
    scheme: str
    layers: list[LayerCost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: str | None = None
    against: str = ORIGINAL
    source_sqnr_db: float | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    file: str | None = None
    serve: str = "vllm serve {folder} (with this package next to vLLM)"

    def counts(self) -> dict[str, int]:
        """Return the number of linear maps by action, those that happened; each expert counts."""
        counts = dict.fromkeys(ACTIONS, 0)
        for layer in self.layers:
            counts[layer.action] += layer.matrices
        return {action: count for action, count in counts.items() if count}

    @property
    def n_layers(self) -> int:
        """Linear maps that are quantized, before or after, or that only the format leaves in full precision."""
        return sum(layer.matrices for layer in self.layers)

    @property
    def changed(self) -> list[LayerCost]:
        """Layers whose values are not exactly what they were."""
        return [layer for layer in self.layers if layer.noise]

    @property
    def total_sqnr_db(self) -> float:
        return sqnr_db(self.layers)

    def error(self) -> str:
        """Return the error of all weights in one sentence, and what it is measured against."""
        error = f"SQNR {self.total_sqnr_db:.2f} dB against {self.against}"
        if self.against == ORIGINAL:
            if not self.changed:
                return "no weight differs from the full-precision ones"
            return error
        if not self.changed:
            error = f"bit for bit {PACKED}"
        before = "whose distance from the original weights is not recorded"
        if self.source_sqnr_db is not None:
            before = f"which themselves have SQNR {self.source_sqnr_db:.2f} dB against the original weights"
        return f"{error}, {before}"

    @property
    def blocks(self) -> tuple[int, int]:
        """The numbers of exact blocks and of all that are counted; see [`LayerCost`]."""
        return sum(layer.exact_blocks for layer in self.layers), sum(layer.blocks for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return a value for JSON; `sqnr_db` is null where nothing changed."""
        exact, blocks = self.blocks
        counted = {"blocks": blocks, "exact_blocks": exact} if blocks else {}
        shown = ["name", "matrices", "action", "reason", "sqnr_db", "bytes_before", "bytes_after", *counted]
        return json_clean(
            {
                "format": self.format,
                "source_scheme": self.scheme,
                "weights": self.weights,
                "n_layers": self.n_layers,
                "actions": self.counts(),
                "n_changed": len(self.changed),
                "sqnr_db": self.total_sqnr_db,
                "sqnr_against": self.against,
                "source_sqnr_db": self.source_sqnr_db,
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "bits_per_weight_before": bits_per_weight(self.layers, "before"),
                "bits_per_weight_after": bits_per_weight(self.layers),
                "notes": self.notes,
                **counted,
                "layers": [{name: getattr(layer, name) for name in shown} for layer in self.layers],
            }
        )


def convert(
    source: LayerSource,
    layers: Sequence[tuple[LayerCost, list[NewTensor]]],
    others: Sequence[NewTensor],
    config: dict[str, Any],
    report: ConversionReport,
    *,
    write: Callable[..., list[Path]] = write_shards,
    overwrite: bool = False,
    on_bytes: OnBytes = ignore_bytes,
    record: Callable[[bool], Mapping[str, str]] = lambda is_done: {},
    files: Mapping[str, Any] | None = None,
    finish: Callable[[Path], None] | None = None,
) -> ConversionReport:
    """Write a checkpoint from the tensors of ``layers`` and ``others``, with ``config`` as `config.json`.

    Args:
        layers: each layer's entry in the report, which is filled as its new tensors are made, and these.
        report: gets the layers' costs and sizes, is written to ``report.file``, and is returned.
        record: returns metadata for the headers of the files, called before and after the tensors are made; the second
            result must not be longer.
        files: values of more JSON files, by name.
        finish: called with the new folder before it gets its name, to write more files into it.
    """
    from transformers.core_model_loading import dot_natural_key

    target = report.path.expanduser().resolve()
    origin = source.folder.path.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise FolderError(f"{target} and the checkpoint {origin} must be apart, neither inside of the other")
    side_files = find_side_files(source.folder.path)
    tensors = [_counted(_finite(tensor), on_bytes, tensor.nbytes) for tensor in others]
    for cost, (first, *rest) in layers:
        shape = source.shapes[cost.name]
        cost.matrices = len(shape.matrices)
        cost.n_weights = shape.n_weights
        cost.bytes_before = source.bytes_of(cost.name)
        cost.bytes_after = sum(tensor.nbytes for tensor in (first, *rest))
        report.layers.append(cost)
        tensors += [_counted(first, on_bytes, cost.bytes_before), *rest]
    tensors.sort(key=lambda tensor: dot_natural_key(tensor.name))  # as `save_pretrained` splits shards

    report.notes += source.notes_on_rest()
    report.bytes_before = sum(tensor.nbytes for tensor in source.folder.tensors.values())
    report.bytes_after = sum(tensor.nbytes for tensor in tensors)
    with writing_to(target), atomic_folder(target, overwrite=overwrite) as folder:
        for file in write(folder, tensors, record(False)):
            write_metadata(file, {"format": "pt", **record(True)})
        for name, value in {"config.json": config, **(files or {})}.items():
            write_json(folder / name, value, sort_keys=True)
        copy_side_files(side_files, source.folder.path, folder)
        if report.file is not None:
            write_json(folder / report.file, report.to_dict(), sort_keys=True)
        if finish is not None:
            finish(folder)
        write_manifest(folder, weight_files(folder))
    return report


def names_to_cast(source: LayerSource, tensors: Sequence[NewTensor], dtype: torch.dtype) -> set[str]:
    """Return the names of ``tensors`` that have the ``dtype`` of the model, but those that transformers loads in
    float32 into a 16-bit model."""
    from transformers.core_model_loading import build_glob_alternation

    names = {tensor.name for tensor in tensors if tensor.dtype == dtype}
    kept_in_float32 = source.model._get_dtype_plan(torch.bfloat16)
    if not kept_in_float32:
        return names
    pattern, *_ = build_glob_alternation(list(kept_in_float32))
    places = source.names.places
    if source.has_experts:
        places = {stored: place for place, stored in source.names.whole.items()} | places
    return {name for name in names if not pattern.search(places.get(name, name))}


def config_in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a `config.json` whose models are in ``dtype``."""
    if not isinstance(value, Mapping):
        return value
    config = {key: config_in_dtype(inner, dtype) for key, inner in value.items()}
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None:
            config[key] = dtype_name(dtype)
    return config


def dtype_notes(before: torch.dtype, after: torch.dtype) -> list[str]:
    """Return what a report says of tensors that are not quantized."""
    if before == after:
        return []
    return [
        f"All other tensors are converted from {dtype_name(before)} to {dtype_name(after)} (--dtype), but those that "
        "transformers keeps in float32."
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in `config.json`."""
    return str(dtype).removeprefix("torch.")


def _finite(tensor: NewTensor) -> NewTensor:
    """Raise [`CheckpointError`] for NaN or infinity in a tensor, before or after a change of its dtype."""

    def make() -> torch.Tensor:
        values = tensor.make()
        if values.is_floating_point() and not values.isfinite().all():
            raise CheckpointError(
                f"{tensor.name} holds NaN or infinity in {dtype_name(values.dtype)}; restore the checkpoint, or use a "
                "wider dtype (--dtype)"
            )
        return values

    return replace(tensor, make=make)


def _counted(tensor: NewTensor, on_bytes: OnBytes, n_bytes: int) -> NewTensor:
    """Call ``on_bytes`` when the values of a tensor have been made."""

    def make() -> torch.Tensor:
        values = tensor.make()
        on_bytes(n_bytes, tensor.name)
        return values

    return replace(tensor, make=make)


def pack_checkpoint(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    config: MXFP4RLConfig | None = None,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> ConversionReport:
    """Write the packed checkpoint that `hf_mxfp4.pack(model).save_pretrained` would, model card included, and return
    the SQNR of every weight, which is also in `pack_report.json`. One layer and one output shard are in memory.

    Args:
        source_dir: a checkpoint trained with ``mode="qat"``, or a plain one.
        out_dir: new or empty folder; with ``overwrite`` also a checkpoint, which is replaced.
        config: of mode ``"packed"``, for a plain checkpoint; a QAT one is packed under its own scheme.
        dtype: of what is not quantized, ``"bfloat16"``, ``"float16"`` or ``"float32"``. By default that of the
            checkpoint, but bfloat16 for a QAT one in float32, which only training needs.

    Raises `CheckpointError` for a checkpoint that cannot be read or is packed already, or a wrong ``config``;
    `FolderError` when ``out_dir`` cannot be written; `ShardError` when a file is missing or damaged.
    """
    one_of("dtype", dtype, (None, *DTYPES))
    folder = open_checkpoint(source_dir)
    source = MasterSource(folder, config)
    config = source.config
    before = after = model_dtype(folder)
    if dtype is not None:
        after = DTYPES[dtype]
    elif not source.is_plain and before.itemsize > 2:
        after = torch.bfloat16
    report = ConversionReport(
        Path(out_dir),
        "mxfp4_rl",
        config.describe(),
        notes=dtype_notes(before, after),
        weights=str(config.weight_scheme),
        file="pack_report.json",
    )
    costs = {layer: LayerCost(layer, "packed") for layer in source.shapes}
    # The SQNR that headers and card give is of rows of each weight, as for a model in memory; the report's is of all.
    energies: list[ErrorEnergy] = []

    def pack(layer: str) -> dict[str, torch.Tensor]:
        shape = source.shapes[layer]

        def pack_matrix(expert: int | None) -> dict[str, torch.Tensor]:
            master = source.finite_master(layer, expert)
            packed = source.pack(master)
            add_packed(energies, master, packed, config, len(shape.matrices))
            values = weight_values(
                packed, shape.in_features, config.weight_scheme, torch.float32, "auto", config.weight_rotation
            )
            costs[layer].add(master, values)
            return packed

        return stack_packed(shape, pack_matrix)

    def record(is_done: bool) -> dict[str, str]:
        # Headers are written before the tensors are made, with room for the number.
        sqnr_db = weight_sqnr(energies) if is_done else WIDEST_FLOAT
        return make_record(config, sqnr_db)

    def add_card(new_folder: Path) -> None:
        save_packed_card(source, weight_sqnr(energies), new_folder, existing=out_dir)

    kept = config.keeping(full_precision_record(source.model, source.reasons))
    rest = source.packed_rest()
    return convert(
        source,
        [(cost, source.packed_layer(layer, pack)) for layer, cost in costs.items()],
        cast_tensors(rest, names_to_cast(source, rest, before), after),
        with_scheme(config_in_dtype(folder.config, after), kept),
        report,
        overwrite=overwrite,
        on_bytes=on_bytes,
        record=record,
        finish=add_card,
    )


def _check_exact(source: ForeignSource, format: TensorScaleFormat, costs: Sequence[LayerCost]) -> None:
    """Count the blocks of a checkpoint with tensor scales, such as NVFP4. Raises [`CheckpointError`] if our packed form
    does not hold some."""
    scheme = source.config.weight_scheme
    for cost in costs:
        for expert in source.shapes[cost.name].matrices:
            stored = source.read_stored(cost.name, expert)
            _, is_exact = format.decode(stored)
            cost.blocks += is_exact.numel()
            cost.exact_blocks += int(is_exact.sum())
            if not is_exact.all():
                values = format.values(stored)
                packed = quantize_weight(values, scheme)
                cost.add(values, weight_values(packed, values.shape[1], scheme, torch.float32), skip_nan=True)
    blocks = sum(cost.blocks for cost in costs)
    inexact = blocks - sum(cost.exact_blocks for cost in costs)
    if inexact:
        raise CheckpointError(
            f"{source.folder.path} has {inexact} of {blocks} blocks of 32 weights whose two NVFP4 scales are not one "
            f"2^e (1 + m/4), which packed weights need. Quantizing their layers again to {scheme} would cost SQNR "
            f"{sqnr_db(costs):.2f} dB; use hf-mxfp4 pack on the full-precision checkpoint that this one was made from"
        )


def import_checkpoint(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    *,
    activations: str | None = None,
    overwrite: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> ConversionReport:
    """Write a compressed-tensors `mxfp4-pack-quantized` or `nvfp4-pack-quantized`, a Quark MXFP4 or a gpt-oss
    checkpoint as a packed one of this package.

    Weights keep their values. Layers that are not quantized there become `modules_to_not_convert`.

    Args:
        activations: how layers take their inputs, the ``x`` of `MXFP4RLConfig.fprop`, where the checkpoint does not
            say it: a model that was trained with ``"mxfp8"`` beside plain MXFP4 is stored as W4A16.

    Raises as [`pack_checkpoint`]; `ValueError` also for ``activations`` that are none, or that the checkpoint says
    itself; `CheckpointError` also for something that this package has no equal of: NVFP4 scales
    that are not ``2**e * (1 + m/4)`` for 32 elements, other elements or group sizes, column orders, other activation
    quantization, quantized heads or routers.
    """
    folder = open_checkpoint(source_dir)
    method = folder.quantization.get("quant_method")
    if not method:
        raise CheckpointError(
            f"{folder.path} is not quantized; there is nothing to import, use hf-mxfp4 pack or export on it"
        )
    if str(method) not in IMPORTABLE:
        raise CheckpointError(f"{folder.path} is quantized by {method!r}; {NOT_IMPORTED}")
    source = ForeignSource(folder, stored_format(folder.quantization))
    if activations is not None:
        stated = source.config.activation_scheme
        if stated is not None:
            raise ValueError(f"activations={activations!r}: {folder.path} says itself that they are {stated}")
        source.config = replace(source.config, fprop={"x": activations})
    costs = [LayerCost(layer, "kept") for layer in source.shapes]
    if isinstance(source.format, TensorScaleFormat):
        _check_exact(source, source.format, costs)
    config = source.config.keeping(full_precision_record(source.model, source.reasons))

    def keep(layer: str) -> dict[str, torch.Tensor]:
        packed = stack_packed(source.shapes[layer], lambda expert: source.read(layer, expert))
        if (packed["weight_scale"] == E8M0_NAN).any():
            raise CheckpointError(f"{folder.path}: {not_finite(layer)}")
        return packed

    return convert(
        source,
        [(cost, source.packed_layer(cost.name, keep)) for cost in costs],
        source.packed_rest(),
        with_scheme(folder.config, config),
        ConversionReport(Path(out_dir), "mxfp4_rl", config.describe(), notes=source.notes, against=PACKED),
        overwrite=overwrite,
        on_bytes=on_bytes,
        record=lambda is_done: make_record(config, None),
        finish=lambda new: save_packed_card(source, None, new, existing=out_dir),
    )
