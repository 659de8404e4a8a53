# SPDX-License-Identifier: Apache-2.0
"""Export to the formats of other engines."""

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxfp4_kernels.scale_rules import SCALE_RULES

from ..config import MXFP4RLConfig
from ..model.layer_names import fused_experts
from ..model.plain_layers import is_linear
from ..numerics import QuantScheme, ScaleRule
from ..numerics.schemes import one_of
from ..ops import quantize_weight, weight_values
from .conversion import (
    DTYPES,
    PACKED,
    ConversionReport,
    LayerCost,
    config_in_dtype,
    convert,
    dtype_name,
    dtype_notes,
    names_to_cast,
)
from .folder import CheckpointError, CheckpointFolder, NewTensor, model_dtype, new_tensors, open_checkpoint
from .formats import FORMATS, Format, PackedFormat, TensorScaleFormat
from .manifest import OnBytes, ignore_bytes
from .names import LayerShape, plain_tensors, stack_packed
from .scheme import without_scheme
from .sources import LayerSource, MasterSource, PackedSource, own_config


ON_MISMATCH = {"refuse": "refused", "requantize": "requantized", "dequantize": "dequantized"}
#: What is done to layers that are not quantized in the exported checkpoint.
FULL_PRECISION = ("dequantized", "left")
#: For plain checkpoints: the rule with the lowest perplexity at 4.25 bits, see docs/checkpoints.md.
DEFAULT_RULE = "even"


def export(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    format: str,
    on_mismatch: str = "refuse",
    *,
    scale_rule: str | None = None,
    preset: str | None = None,
    dtype: str | None = None,
    modules_to_not_convert: Sequence[str] | None = None,
    overwrite: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> ConversionReport:
    """Write a full-precision, a trained (``mode="qat"``) or a packed checkpoint in another engine's format.

    Full-precision weights are quantized once, to plain MXFP4 in blocks of 1x32, for NVFP4 with block mantissas. Packed
    plain MXFP4 keeps its bytes, and its values as NVFP4. Macro factors and outlier fallback are by default refused. One
    layer and one output shard are in memory at a time.

    Args:
        source_dir: folder of a safetensors checkpoint.
        out_dir: new or empty folder; with ``overwrite`` also a checkpoint, which is replaced.
        format: ``"compressed-tensors"``, ``"nvfp4"``, ``"nvfp4-modelopt"``, ``"quark"``, ``"gpt-oss"``, ``"gguf"`` or
            ``"bf16"``.
        on_mismatch: for layers that the format cannot hold: ``"refuse"``; ``"requantize"`` without what it
            cannot; ``"dequantize"`` to ``dtype``. Layers that cannot be 4-bit there at all are dequantized under either
            of the last two, and those that a format never quantizes always.
        scale_rule: how block scales are chosen, the name of a [`ScaleRule`]. By default ``"even"`` for a plain
            checkpoint; for others their own. Given a rule, a trained checkpoint is quantized without its macro factors
            and outlier fallback.
        preset: ``"w4a16"``, or ``"w4a4"`` for engines that quantize activations too. By default ``"w4a4"`` if the
            checkpoint's own activations are MXFP4; engines do not have those in FP8 with 4-bit weights.
        dtype: of what is not quantized, ``"bfloat16"`` (default), ``"float16"`` or ``"float32"``.
        modules_to_not_convert: for a plain checkpoint: layers to leave alone, as in [`MXFP4RLConfig`].

    Returns:
        What was done to each layer and its error in decibels, against the full-precision weights if these were read,
        and against the packed ones otherwise; also in `export_report.json` in the folder.

    Raises as [`pack_checkpoint`]; `CheckpointError` also when the format does not hold the source and
    ``on_mismatch="refuse"``, or an argument has no effect on it.
    """
    one_of("format", format, tuple(FORMATS))
    one_of("on_mismatch", on_mismatch, tuple(ON_MISMATCH))
    one_of("scale_rule", scale_rule, (None, *SCALE_RULES))
    one_of("preset", preset, (None, "w4a16", "w4a4"))
    one_of("dtype", dtype, (None, *DTYPES))
    folder = open_checkpoint(source_dir)
    source = _open_source(folder, FORMATS[format], scale_rule, preset, modules_to_not_convert)
    target = FORMATS[format].for_checkpoint(folder, source.model, _has_4_bit_inputs(source.config, preset))
    before = model_dtype(folder)
    after = DTYPES[dtype or "bfloat16"]
    if dtype is None and before == torch.float16 and target.keeps_float16:
        after = before

    # Decide what is done to each layer, and report it.
    plan = Plan(source, target, scale_rule, on_mismatch, after)
    quantized = sorted(layer for layer, cost in plan.costs.items() if cost.action not in FULL_PRECISION)
    ignored = ignored_layers(source, set(quantized))
    report = ConversionReport(
        Path(out_dir),
        format,
        source.config.describe(),
        notes=[*target.notes(source.config, ignored, quantized), *plan.notes(before)],
        file="export_report.json",
        serve=target.serve,
    )
    if plan.is_plain:
        report.scheme = "full precision"
    if plan.quantizes or plan.is_plain:
        report.weights = str(plan.written)
    if isinstance(source, PackedSource):
        report.against = PACKED
        report.source_sqnr_db = source.sqnr_db

    # Describe the exported model in config.json.
    config = config_in_dtype(without_scheme(folder.config), after)
    if _has_own_head(source):
        config = _untied(config)
        report.notes.append("The head differs from the embeddings, so config.json has tie_word_embeddings=false.")
    files: dict[str, Any] = {}
    if quantized:
        options = target.quantization_config(source.config, ignored, quantized)
        if options is not None:
            config["quantization_config"] = options
            files = target.more_files(options)

    # Write the layers, and all other tensors. A format that leaves one out must not lose it without a word.
    rest = source.plain_rest() if target.plain_names else source.model_rest()
    unwritten = {tensor.name for tensor in rest}

    def check_all_written(new_folder: Path) -> None:
        if unwritten:
            raise CheckpointError(
                f"format {format!r} has no place for {min(unwritten)} of {folder.path}; use format 'bf16'"
            )

    return convert(
        source,
        [plan.layer(cost) for cost in plan.costs.values()],
        target.others([_watched(tensor, unwritten) for tensor in rest], names_to_cast(source, rest, before), after),
        config,
        report,
        write=target.write,
        overwrite=overwrite,
        on_bytes=on_bytes,
        files=files,
        finish=check_all_written,
    )


def _watched(tensor: NewTensor, unwritten: set[str]) -> NewTensor:
    """Return a tensor that takes its name out of ``unwritten`` when it is made to be written."""

    def make() -> torch.Tensor:
        unwritten.discard(tensor.name)
        return tensor.make()

    return replace(tensor, make=make)


def option(name: str, value: Any) -> str:
    """Return an argument with its value, and the option of the command in brackets."""
    flag = {"modules_to_not_convert": "skip"}.get(name, name.replace("_", "-"))
    values = [value] if isinstance(value, str) else value
    command = " ".join(f"--{flag} {item}" for item in values)
    return f"{name}={value!r} ({command})"


def _open_source(
    folder: CheckpointFolder, format: Format, scale_rule: str | None, preset: str | None, skips: Sequence[str] | None
) -> LayerSource:
    """Return the source of a packed, a trained or a plain checkpoint, which gets a scheme that ``format`` holds.

    Raises [`CheckpointError`] for arguments without effect on it.
    """
    if preset == "w4a4" and not format.quantizes_activations:
        raise CheckpointError(
            f"{option('preset', 'w4a4')} has no effect in format {format.name!r}, whose engines compute activations in "
            f"full precision; leave it out, or use {option('format', 'quark')}"
        )
    own = own_config(folder)
    if own is not None:
        if skips is not None:
            raise CheckpointError(
                f"{folder.path} has a scheme of its own ({own.describe()}); leave out "
                f"{option('modules_to_not_convert', skips)}"
            )
        if own.mode == "packed":
            return PackedSource(folder)
        return MasterSource(folder)
    options: dict[str, Any] = {**format.holds, "outlier_fallback": None, "modules_to_not_convert": skips}
    rule = scale_rule or DEFAULT_RULE
    return MasterSource(folder, MXFP4RLConfig(mode="packed", preset=preset or "w4a16", scale_rule=rule, **options))


def _has_4_bit_inputs(config: MXFP4RLConfig, preset: str | None) -> bool:
    """Return whether inputs are quantized to 4 bits under ``preset``, or by default as those of the checkpoint are."""
    if preset is None:
        return isinstance(config.activation_scheme, QuantScheme)
    return preset == "w4a4"


class Plan:
    """What an export does to each layer, and doing it.

    Attributes:
        has_masters, is_plain: whether full-precision weights are read, and whether they were never quantized.
        written: the scheme of what is quantized here.
        dtype: of what is not.
        costs: the entry of each layer in the report, with its action, and why if the format leaves no choice.

    Raises [`CheckpointError`] for what the format cannot hold, and for a scale rule without effect.
    """

    def __init__(self, source: Any, format: Any, scale_rule: str | None, on_mismatch: str, dtype: torch.dtype):
        self.source = source
        self.format = format
        self.scheme = source.config.weight_scheme
        self.dtype = dtype
        self.has_masters = isinstance(source, MasterSource)
        self.is_plain = self.has_masters and source.is_plain
        self.is_packed = isinstance(format, PackedFormat)
        if source.config.weight_rotation is not None and self.is_packed:
            raise CheckpointError(
                f"{source.folder.path} has a scheme whose products rotate both operands "
                f"({source.config.weight_rotation}), and format {format.name!r} cannot hold rotated weights. Format "
                "'bf16' can, dequantized and rotated back; for 4 bits elsewhere, export the checkpoint that they were "
                "made from (hf-mxfp4 gptq --scheme even)"
            )
        self.misfits = format.misfits(self.scheme)
        self.written = self._held_scheme(scale_rule)
        if self.has_masters:
            # They are quantized here, by the scheme of their training unless another one is asked for.
            if scale_rule is None and not (self.misfits and on_mismatch == "requantize"):
                self.written = self.scheme
            self.misfits = format.misfits(self.written)
        self.costs = {
            layer: LayerCost(layer, *self._decide(shape, on_mismatch)) for layer, shape in source.shapes.items()
        }
        self._top_exponents: dict[str, int] = {}
        self.actions = {cost.action for cost in self.costs.values()}
        if "refused" in self.actions:
            raise self._refusal()
        if scale_rule is not None and not self.quantizes and not self.is_plain:
            values = "packed bytes are kept"
            if self.has_masters:
                values = "quantized values are written"
            raise CheckpointError(
                f"{option('scale_rule', scale_rule)} has no effect here: the {values} as {source.folder.path} has them "
                f"({self.scheme}). Leave it out, or export the original full-precision checkpoint with it"
            )

    @property
    def quantizes(self) -> bool:
        """Whether some weights are quantized here."""
        return not self.actions.isdisjoint({"packed", "requantized"})

    def _held_scheme(self, scale_rule: str | None) -> QuantScheme:
        """Return the source's blocks and rule, unless one is given, with what the format holds."""
        rule = ScaleRule(scale_rule or self.scheme.scale_rule)
        return QuantScheme(rule, **self.format.holds, block_rows=self.scheme.block_rows)

    def _decide(self, shape: LayerShape, on_mismatch: str) -> tuple[str, str | None]:
        """Return what is done to a layer, and why if the format leaves no choice."""
        if not self.is_packed:
            return "dequantized", None
        # Weights of a plain checkpoint were never quantized, and stay so.
        full_precision = "left" if self.is_plain else "dequantized"
        reason = self.format.leaves_out(shape)
        if reason is not None:
            return full_precision, reason
        reason = self.format.shape_misfit(shape)
        if reason is not None:
            # No scheme makes the shape fit, so that "requantize" cannot help either.
            action = "refused" if on_mismatch == "refuse" else full_precision
            return action, reason
        if self.misfits:
            return ON_MISMATCH[on_mismatch], None
        if self.has_masters:
            return "packed", None
        return "kept", None

    def layer(self, cost: LayerCost) -> tuple[LayerCost, list[NewTensor]]:
        """Return a layer's entry in the report, which is filled as its tensors are made, and these."""
        format = self.format
        shape = self.source.shapes[cost.name]
        name = self.source.in_plain_files(cost.name) if format.plain_names else cost.name

        def make_quantized() -> dict[str, torch.Tensor]:
            packed = stack_packed(shape, lambda expert: self._packed(cost, expert))
            return format.tensors(name, shape, packed)

        def make_full_precision() -> dict[str, torch.Tensor]:
            matrices = [self._full_precision(cost, expert) for expert in shape.matrices]
            weight = matrices[0] if shape.experts is None else torch.stack(matrices)
            return format.full_tensors(name, shape, weight)

        if cost.action in FULL_PRECISION:
            specs = format.full_tensors(name, shape, shape.meta().to(self.dtype))
            return cost, new_tensors(specs, make_full_precision)
        return cost, new_tensors(format.specs(name, shape), make_quantized)

    def _packed(self, cost: LayerCost, expert: int | None) -> dict[str, torch.Tensor]:
        """Return the fields of one matrix that the format stores, in the scheme [`written`] unless they are kept."""
        before, packed = self._quantized(cost, expert)
        is_converted = isinstance(self.format, TensorScaleFormat)
        if before is None and not is_converted:
            return packed
        scheme = self.scheme if cost.action == "kept" else self.written
        values = weight_values(packed, self.source.shapes[cost.name].in_features, scheme, torch.float32)
        if before is None:
            before = values
        if is_converted:
            # The blocks of this format have scales of another type, which may change values.
            packed = self.format.encode(packed, self._top_exponent(cost.name))
            stored = self.format.values(packed)
            cost.count(values, stored)
            values = stored
        cost.add(before, values, skip_nan=True)
        return packed

    def _quantized(self, cost: LayerCost, expert: int | None) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Return one matrix before it is quantized here, `None` if it is kept, and its packed fields."""
        source = self.source
        if cost.action == "packed":
            master = source.finite_master(cost.name, expert)
            return master, quantize_weight(master, self.written, source.config.backend)
        packed = source.read(cost.name, expert)
        if cost.action == "kept":
            return None, packed
        values = weight_values(packed, source.shapes[cost.name].in_features, self.scheme, torch.float32)
        return values, quantize_weight(values, self.written, "auto")

    def _top_exponent(self, layer: str) -> int:
        """Return the largest exponent of the block scales in all layers of a module; it is computed once."""
        module = layer.rpartition(".")[0]
        if module not in self._top_exponents:
            exponents = []
            for other, cost in self.costs.items():
                if other.rpartition(".")[0] != module or cost.action in FULL_PRECISION:
                    continue
                for expert in self.source.shapes[other].matrices:
                    _, packed = self._quantized(cost, expert)
                    exponents.append(self.format.top_exponent(packed))
            self._top_exponents[module] = max(exponents)
        return self._top_exponents[module]

    def _full_precision(self, cost: LayerCost, expert: int | None) -> torch.Tensor:
        """Return one matrix in [`dtype`], with its quantized values unless it is left alone."""
        source = self.source
        before = None
        if self.has_masters:
            before = source.finite_master(cost.name, expert)
            if cost.action == "left":
                return before.to(self.dtype)
            packed = source.pack(before)
        else:
            packed = source.read(cost.name, expert)
        columns = source.shapes[cost.name].in_features
        rotation = source.config.weight_rotation
        values = weight_values(packed, columns, self.scheme, self.dtype, "auto", rotation)
        if before is None:
            before = weight_values(packed, columns, self.scheme, torch.float32, "auto", rotation)
        cost.add(before, values, skip_nan=True)
        return values

    def _refusal(self) -> CheckpointError:
        """Return the error for layers that the format cannot hold, which says what to do."""
        shapes = self.source.shapes
        refused = {layer: cost.reason for layer, cost in self.costs.items() if cost.action == "refused"}
        n_refused = sum(len(shapes[layer].matrices) for layer in refused)
        n_layers = sum(len(shape.matrices) for shape in shapes.values())
        reasons = []
        if self.misfits:
            reasons.append(f"it has no place for {' and '.join(self.misfits)}")
        misshapen = sorted(layer for layer, reason in refused.items() if reason)
        if misshapen:
            layers = misshapen[0]
            if len(misshapen) > 1:
                layers += f" and {len(misshapen) - 1} more"
            reasons.append(f"of {layers}, {refused[misshapen[0]]}")
        scheme = "" if self.is_plain else f" ({self.scheme})"
        even = option("scale_rule", DEFAULT_RULE)
        requantize = option("on_mismatch", "requantize")
        dequantize = option("on_mismatch", "dequantize")
        advice = f"{dequantize} writes them in 16 bits"
        if self.misfits and self.has_masters:
            advice = (
                f"Best: {even} quantizes the full-precision weights once ({self._held_scheme(DEFAULT_RULE)}); "
                f"{requantize} does so by their own rule. Only {dequantize} keeps the values of the policy, in 16 bits"
            )
        elif self.misfits:
            advice = (
                f"Best: export the original full-precision checkpoint with {even}. {requantize} quantizes the packed "
                f"weights again ({self.written}), which costs much more accuracy; {dequantize} makes bfloat16"
            )
        return CheckpointError(
            f"format {self.format.name!r} cannot hold {n_refused} of {n_layers} layers of {self.source.folder.path}"
            f"{scheme}: {'; '.join(reasons)}. {advice}"
        )

    def notes(self, dtype: torch.dtype) -> list[str]:
        """Say in sentences what was changed; ``dtype`` is the model's."""
        notes = []
        reasons = [self.format.leaves_out(shape) for shape in self.source.shapes.values()]
        left_out = [reason for reason in reasons if reason is not None]
        if left_out:
            done = "left in" if "left" in self.actions else "dequantized to"
            notes.append(f"{len(left_out)} layers were {done} {dtype_name(self.dtype)}: {left_out[0]}.")
        if "requantized" in self.actions:
            notes.append(
                f"The packed weights were quantized a second time ({self.written}). Exporting the full-precision "
                "checkpoint that they were packed from loses less."
            )
        if "packed" in self.actions and not self.is_plain and self.written != self.scheme:
            notes.append(
                f"The policy was trained with weights in {self.scheme}; the exported ones are {self.written}, "
                "quantized once from its full-precision weights."
            )
        notes += dtype_notes(dtype, self.dtype)
        if self.is_packed and self.actions <= {"dequantized", "left"}:
            notes.append("No layer is 4-bit any more: this is a plain checkpoint, as format bf16 writes it.")
        return notes


def ignored_layers(source: LayerSource, quantized: Set[str]) -> list[str]:
    """Return the names of all that an engine may take for a linear layer and that is not quantized, sorted: the model's
    linear layers, other matrices in the files but embeddings, and modules of experts that are one tensor there."""
    names = source.names

    # Matrices in the files.
    dims = {tensor.name: len(tensor.shape) for tensor in source.plain_rest()}
    for layer, shape in source.shapes.items():
        if layer not in quantized:
            tensors = plain_tensors(source.in_plain_files(layer), shape, shape.meta())
            dims |= {name: tensor.dim() for name, tensor in tensors.items()}
    ignored = {name.removesuffix(".weight") for name, dim in dims.items() if name.endswith(".weight") and dim == 2}

    # Linear layers of the model, and its embeddings.
    embeddings = set()
    for name, module in source.model.named_modules(remove_duplicate=False):
        if is_linear(module):
            ignored.add(name)
        elif isinstance(module, nn.Embedding):
            stored = names.stored.get(f"{name}.weight", "")
            embeddings |= {name, stored.removesuffix(".weight")}

    # Experts. A module of which all weights are ignored is ignored itself.
    for name in fused_experts(source.model):
        parameters = source.model.get_submodule(name).named_parameters(recurse=False)
        weights = [f"{name}.{projection}" for projection, weight in parameters if weight.dim() == 3]
        whole = []  # in full precision, and one tensor in the files
        for weight in weights:
            is_split = any(piece.name in dims for piece in names.pieces.get(weight, ()))
            if weight not in quantized and not is_split:
                whole.append(weight)
        if whole == weights:
            ignored |= {name, *names.others.get(name, ())}
        else:
            ignored |= set(whole)
    return sorted(ignored - embeddings - quantized)


def _has_own_head(source: LayerSource) -> bool:
    """Return whether the files have a head that differs from the embeddings, though the config ties them: transformers
    computes with it, and vLLM with the embeddings. T5 and its kind scale the head's input by this option instead."""
    model = source.model
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    stored_names = source.names.stored
    tensors = source.folder.tensors
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, origin in tied.items():
        if target in stored_names and origin in stored_names:
            head = tensors[stored_names[target]].read()
            embeddings = tensors[stored_names[origin]].read()
            if not torch.equal(head, embeddings):
                return True
    return False


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` that ties no weights."""
    config = {**config, "tie_word_embeddings": False}
    if config.get("text_config"):
        config["text_config"] = _untied(config["text_config"])
    return config
