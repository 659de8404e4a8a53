# SPDX-License-Identifier: Apache-2.0
"""Export to the formats of other engines."""

import os
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import MXFP4RLConfig
from ...numerics import QuantScheme, ScaleRule
from ...numerics.schemes import one_of
from ..card.export import write_export_card
from ..formats import FORMATS, Format, PackedFormat
from ..formats.base import plain_sizes
from ..io.folder import ArgumentError, CheckpointError, Spelling, model_dtype, open_checkpoint
from ..io.guard import without_scheme
from ..io.validate import WIDEST_FLOAT, make_record
from ..io.writer import MAX_SHARD_SIZE, OtherTensor
from .calibration import Calibration
from .conversion import OnBytes, convert
from .costs import ORIGINAL, PACKED, ConversionReport
from .exported_layer import Decision, ExportedLayer, decide
from .other_tensors import model_tensors, plain_model_tensors
from .sources import LayerSource, MasterSource, PackedSource, own_config


ON_MISMATCH = ("refuse", "requantize", "dequantize")
REPORT = "export_report.json"
#: Of plain checkpoints: the rule with the lowest perplexity at 4.25 bits, see docs/checkpoints.md.
DEFAULT_RULE = "even"


def export(
    source_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    format: str,
    on_mismatch: str = "refuse",
    *,
    scale_rule: str | None = None,
    preset: str | None = None,
    modules_to_not_convert: Sequence[str] | None = None,
    calibration: Sequence[str] | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = lambda count, name: None,
) -> ConversionReport:
    """Write a full-precision, a trained (``mode="qat"``) or a packed checkpoint in another engine's format.

    Full-precision weights, plain or trained, are quantized once, to plain MXFP4 in blocks of 1x32. Packed plain MXFP4
    keeps its bytes. Macro factors and outlier fallback have no place in other formats: by default they are refused. One
    layer is in memory at a time, and of experts one.

    Args:
        source_dir: folder of a safetensors checkpoint.
        out_dir: new or empty folder; with ``overwrite`` also a checkpoint, which is replaced.
        format: ``"compressed-tensors"``, ``"quark"``, ``"gpt-oss"``, ``"gguf"`` or ``"bf16"``.
        on_mismatch: for layers that the format cannot hold: ``"refuse"``; ``"requantize"`` to plain MXFP4;
            ``"dequantize"`` to bfloat16. Layers that cannot be MXFP4 there at all are dequantized (those of plain
            checkpoints left as they are) under either of the last two, and those that a format never quantizes always.
        scale_rule: how block scales are chosen: ``"rceil"``, ``"floor"``, ``"even"`` or ``"mse"``. By default
            ``"even"`` for a plain checkpoint; for others their own, so that the codes of a trained one are those of its
            policy. Given a rule, a trained checkpoint is quantized without its macro factors and outlier fallback.
        preset: for a plain checkpoint: ``"w4a16"`` (default), or ``"w4a4"`` for engines that quantize activations too.
        modules_to_not_convert: for a plain checkpoint: layers to leave alone, as in [`MXFP4RLConfig`].
        calibration: texts like those that the model will read, for full-precision weights of linear layers: these are
            then rounded so that outputs on the texts change least ([`hf_mxfp4.lab.gptq.weight.round_weight`]). The
            model is loaded for it.

    Returns:
        What was done to each layer and what it cost, which is also in `export_report.json` in the folder: the ratio of
        the values to their change, in decibels. The values are those of the full-precision weights where these were
        read, and of the packed ones otherwise.

    Raises:
        CheckpointError: the source cannot be read, the format does not hold it and ``on_mismatch="refuse"``, or an
            argument has no effect on it.
        FolderError: ``out_dir`` cannot be written.
        ShardError: a file of the source is missing or damaged.
        ValueError: an unknown ``format``, ``on_mismatch``, ``scale_rule`` or ``preset``.
    """
    one_of("format", format, tuple(FORMATS))
    one_of("on_mismatch", on_mismatch, ON_MISMATCH)
    one_of("scale_rule", scale_rule, (None, *(rule.value for rule in ScaleRule)))
    target = FORMATS[format]
    folder = open_checkpoint(source_dir)
    own = own_config(folder)
    if own is None:
        config = _plain_config(target, scale_rule, preset, modules_to_not_convert)
    else:
        config = None
        for name, value in (("preset", preset), ("modules_to_not_convert", modules_to_not_convert)):
            if value is not None:
                raise _own_scheme(folder.path, own, name, value)
    packed = own is not None and own.mode == "packed"
    source: LayerSource = PackedSource(folder) if packed else MasterSource(folder, config)
    if reason := target.architecture_misfit(source.model.config):
        raise CheckpointError(f"format {format!r} cannot hold {source.folder.path}: {reason}")
    target = target.for_checkpoint(folder, source.model)
    if source.config.weight_rotation is not None and isinstance(target, PackedFormat):
        raise CheckpointError(
            f"{source.folder.path} has a scheme whose products rotate both operands "
            f"({source.config.weight_rotation}), and format {format!r} has no place for rotated weights. Format 'bf16' "
            "takes them, dequantized and rotated back; for 4 bits elsewhere, export the checkpoint that they were made "
            "from (hf-mxfp4 gptq --scheme even)"
        )
    written = _written(source, target, scale_rule, on_mismatch)
    decisions = {layer: decide(target, source, written, shape, on_mismatch) for layer, shape in source.shapes.items()}
    if any(decision.action == "refused" for decision in decisions.values()):
        raise _refusal(source, target, written, decisions)
    if scale_rule is not None and own is not None:
        _check_rule_counts(source, scale_rule, decisions)
    quantized = {layer for layer, decision in decisions.items() if decision.action not in ("dequantized", "left")}
    plain = plain_model_tensors(source)
    others = plain if target.plain_names else model_tensors(source)
    names = ignored_layers(source, plain, quantized), sorted(quantized)
    options = target.quantization_config(source.config, *names) if quantized else None
    report = ConversionReport(
        Path(out_dir),
        format,
        "full precision" if own is None else source.config.describe(),
        notes=target.notes(source.config, *names),
        weights=_new_weights(source, written, decisions),
        against=PACKED if packed else ORIGINAL,
        source_sqnr_db=source.sqnr_db if isinstance(source, PackedSource) else None,
    )
    dtype = model_dtype(folder)
    report.notes += _notes(source, target, decisions, written, dtype)
    inputs = None if calibration is None else _calibrate(source, decisions, written, calibration)
    if inputs is not None:
        report.notes.append(_calibration_note(source, decisions, inputs))
    metadata, final_metadata = _metadata(source, decisions, report)
    how = target.how_to_run
    return convert(
        source,
        out_dir,
        {
            layer: ExportedLayer(source, layer, target, decision, written, inputs)
            for layer, decision in decisions.items()
        },
        target.others(others, dtype),
        _config(folder.config, options),
        report,
        open_writer=target.open_writer,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        on_bytes=on_bytes,
        report_file=REPORT,
        metadata=metadata,
        final_metadata=final_metadata,
        finish=how and partial(write_export_card, source, report, how, existing=out_dir),
    )


def _calibrate(
    source: LayerSource, decisions: Mapping[str, Decision], written: QuantScheme, texts: Sequence[str]
) -> Calibration:
    shapes = {layer: source.shapes[layer] for layer, decision in decisions.items() if decision.action == "packed"}
    layers = {layer: shape.in_features for layer, shape in shapes.items() if shape.experts is None}
    if not layers:
        raise ArgumentError(
            lambda spell: (
                f"{spell('calibration', '...')} has no effect here: no linear layer of {source.folder.path} is "
                "quantized from full precision; leave it out, or export the original checkpoint"
            )
        )
    if written != QuantScheme(written.scale_rule):
        raise CheckpointError(f"calibration is for plain MXFP4 in blocks of 1x32, not for {written}")
    return Calibration(source.folder, layers, texts)


def _calibration_note(source: LayerSource, decisions: Mapping[str, Decision], inputs: Calibration) -> str:
    packed = [layer for layer, decision in decisions.items() if decision.action == "packed"]
    n_experts = sum(source.shapes[layer].experts is not None for layer in packed)
    experts = f" ({n_experts} weights of experts are rounded to nearest)" if n_experts else ""
    return (
        f"Weights are rounded for the least change of outputs on {inputs.n_tokens} tokens of calibration texts"
        f"{experts}: their own SQNR is lower for it."
    )


def plain_scheme(scheme: QuantScheme, scale_rule: str | None = None) -> QuantScheme:
    """The scheme without macro factors and outlier fallback: the same blocks, and the same rule unless one is given."""
    return QuantScheme(ScaleRule(scale_rule or scheme.scale_rule), block_rows=scheme.block_rows)


def _own_scheme(path: Path, own: MXFP4RLConfig, name: str, value: Any) -> ArgumentError:
    return ArgumentError(
        lambda spell: f"{path} has a scheme of its own ({own.describe()}); leave out {spell(name, value)}"
    )


def _plain_config(
    format: Format, scale_rule: str | None, preset: str | None, skips: Sequence[str] | None
) -> MXFP4RLConfig:
    """The scheme that a plain checkpoint gets."""
    if preset == "w4a4" and not format.quantizes_activations:
        raise ArgumentError(
            lambda spell: (
                f"{spell('preset', 'w4a4')} has no effect in format {format.name!r}, whose engines compute activations "
                f"in full precision; leave it out, or use {spell('format', 'quark')}"
            )
        )
    return MXFP4RLConfig(
        mode="packed",
        preset=preset or "w4a16",
        scale_rule=scale_rule or DEFAULT_RULE,
        macro_block=None,
        modules_to_not_convert=skips,
    )


def _written(source: LayerSource, format: Format, scale_rule: str | None, on_mismatch: str) -> QuantScheme:
    """The scheme of whatever is quantized on the way."""
    scheme = source.config.weight_scheme
    misfits = isinstance(format, PackedFormat) and bool(format.misfits(scheme))
    anew = scale_rule is not None or misfits and on_mismatch == "requantize"
    return plain_scheme(scheme, scale_rule) if anew or not isinstance(source, MasterSource) else scheme


def _check_rule_counts(source: LayerSource, scale_rule: str, decisions: Mapping[str, Decision]) -> None:
    if any(decision.action in ("packed", "requantized") for decision in decisions.values()):
        return
    values = "packed bytes are kept" if isinstance(source, PackedSource) else "quantized values are written"
    raise ArgumentError(
        lambda spell: (
            f"{spell('scale_rule', scale_rule)} has no effect here: the {values} as {source.folder.path} has them "
            f"({source.config.weight_scheme}). Leave it out, or export the original full-precision checkpoint with it"
        )
    )


def _new_weights(source: LayerSource, written: QuantScheme, decisions: Mapping[str, Decision]) -> str | None:
    """The scheme of the weights written, if it is new to them."""
    actions = {decision.action for decision in decisions.values()}
    plain = isinstance(source, MasterSource) and source.is_plain
    return str(written) if actions & {"packed", "requantized"} or plain else None


def ignored_layers(source: LayerSource, others: Sequence[OtherTensor], quantized: Set[str]) -> list[str]:
    """Names of everything that an engine may take for a linear layer and that is not quantized, sorted.

    These are the model's linear layers, and the matrices in the files that are neither embeddings nor of such a layer:
    experts have one each there while the model keeps them in one.
    """
    dequantized = {
        name: size
        for layer, shape in source.shapes.items()
        if layer not in quantized
        for name, size in plain_sizes(source.in_plain_files(layer), shape).items()
    }
    modules = dict(source.model.named_modules(remove_duplicate=False))
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    matrices = {
        name.removesuffix(".weight")
        for name, shape in [*((tensor.name, tensor.shape) for tensor in others), *dequantized.items()]
        if name.endswith(".weight") and len(shape) == 2
    }
    embeddings = {name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    embeddings |= {source.names.stored.get(f"{name}.weight", "").removesuffix(".weight") for name in embeddings}
    return sorted((linears | matrices) - embeddings - quantized)


def _refusal(
    source: LayerSource, format: PackedFormat, written: QuantScheme, decisions: Mapping[str, Decision]
) -> ArgumentError:
    refused = {layer: decision.reason for layer, decision in decisions.items() if decision.action == "refused"}
    odd = {layer: reason for layer, reason in refused.items() if reason}
    parts = format.misfits(written if isinstance(source, MasterSource) else source.config.weight_scheme)
    reasons = [f"it has no place for {' and '.join(parts)}"] if parts else []
    if odd:
        reasons.append(f"of {min(odd)}{_and_more(odd)}, {odd[min(odd)]}")
    n_refused, n_layers = (sum(source.shapes[layer].n_matrices for layer in layers) for layers in (refused, decisions))
    plain = isinstance(source, MasterSource) and source.is_plain
    scheme = "" if plain else f" ({source.config.weight_scheme})"
    problem = (
        f"format {format.name!r} cannot hold {n_refused} of {n_layers} layers of {source.folder.path}{scheme}: "
        f"{'; '.join(reasons)}. "
    )

    def message(spell: Spelling) -> str:
        requantize, dequantize = (spell("on_mismatch", choice) for choice in ("requantize", "dequantize"))
        if not parts:
            done = "leaves them in bfloat16" if plain else "makes them bfloat16"
            return f"{problem}{dequantize} {done}, listed as not quantized"
        if isinstance(source, MasterSource):
            return (
                f"{problem}Best: {spell('scale_rule', DEFAULT_RULE)} quantizes the full-precision weights straight to "
                f"plain MXFP4, once; {requantize} does so with their own rule "
                f"({plain_scheme(source.config.weight_scheme)}). Neither is exactly the policy that was trained; "
                f"{dequantize} is, in bfloat16, which costs memory"
            )
        return (
            f"{problem}Best: export the original full-precision checkpoint instead, plain or trained, with "
            f"{spell('scale_rule', DEFAULT_RULE)}: its weights are then quantized once. Of the packed ones, "
            f"{requantize} makes plain MXFP4 ({written}), which quantizes twice and costs much more accuracy; "
            f"{dequantize} makes bfloat16, which costs memory"
        )

    return ArgumentError(message)


def _and_more(names: Mapping[str, Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _notes(
    source: LayerSource,
    format: Format,
    decisions: Mapping[str, Decision],
    written: QuantScheme,
    dtype: torch.dtype,
) -> list[str]:
    notes = []
    actions = [decision.action for decision in decisions.values()]
    if isinstance(format, PackedFormat):
        left_out = [reason for shape in source.shapes.values() if (reason := format.leaves_out(shape))]
        if left_out:
            done = "left in" if "left" in actions else "dequantized to"
            notes.append(f"{len(left_out)} layers were {done} bfloat16: {left_out[0]}.")
    if "requantized" in actions:
        notes.append(
            f"The packed weights were quantized a second time ({written}). Exporting the full-precision checkpoint "
            "that they were packed from loses less."
        )
    if "packed" in actions and not source.is_plain and written != source.config.weight_scheme:
        notes.append(
            f"The policy was trained with weights in {source.config.weight_scheme}; the exported ones are "
            f"{written}, quantized once from its full-precision weights."
        )
    if dtype != torch.bfloat16:
        notes.append(f"All other tensors are converted from {dtype} to bfloat16, what other engines compute in.")
    if isinstance(format, PackedFormat) and set(actions) <= {"dequantized", "left"}:
        notes.append("No layer is MXFP4 any more: this is a plain checkpoint, as format bf16 writes it.")
    return notes


def _metadata(
    source: LayerSource, decisions: Mapping[str, Decision], report: ConversionReport
) -> tuple[dict[str, str], Callable[[], Mapping[str, str]] | None]:
    """What is recorded of the weights, so that an import finds it again: what a packed source says of them as long as
    they are the same, and what was measured of those that were quantized here; for the headers at first and at last."""
    actions = {decision.action for decision in decisions.values()}
    if isinstance(source, PackedSource):
        return (make_record(source.config, source.sqnr_db) if actions == {"kept"} else {}), None
    if "packed" not in actions or "dequantized" in actions:
        return {}, None
    plain = MXFP4RLConfig(mode="packed", macro_block=None)  # a record says nothing of the rule
    return make_record(plain, WIDEST_FLOAT), lambda: make_record(plain, report.total_sqnr_db)


def _config(config: Mapping[str, Any], options: dict[str, Any] | None) -> dict[str, Any]:
    """`config.json` of a bfloat16 model, with another `quantization_config` or none."""
    rest = _in_bf16(without_scheme(config))
    return rest if options is None else {**rest, "quantization_config": options}


def _in_bf16(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {k: "bfloat16" if k in ("dtype", "torch_dtype") and v is not None else _in_bf16(v) for k, v in value.items()}
