# SPDX-License-Identifier: Apache-2.0
"""Export to the formats of other engines."""

import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..numerics import QuantScheme, ScaleRule
from ..numerics.schemes import one_of
from .conversion import convert
from .exported_layer import Decision, decide, exported_layer
from .folder import CheckpointError, model_dtype, open_checkpoint
from .formats import FORMATS, Format, PackedFormat
from .layers import plain_tensors
from .manifest import OnBytes, ignore_bytes
from .report import ORIGINAL, PACKED, ConversionReport
from .scheme import without_scheme
from .sources import LayerSource, MasterSource, PackedSource, own_config
from .tensors import MAX_SHARD_SIZE


ON_MISMATCH = ("refuse", "requantize", "dequantize")
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
    modules_to_not_convert: Sequence[str] | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = ignore_bytes,
) -> ConversionReport:
    """Write a full-precision, a trained (``mode="qat"``) or a packed checkpoint in another engine's format.

    Full-precision weights, plain or trained, are quantized once, to plain MXFP4 in blocks of 1x32. Packed plain MXFP4
    keeps its bytes. Other formats cannot hold macro factors and outlier fallback: by default they are refused. One
    layer and one output shard are in memory at a time.

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

    Returns:
        What was done to each layer and its error, which is also in `export_report.json` in the folder: the ratio of the
        values to their change, in decibels. The values are those of the full-precision weights if these were read, and
        of the packed ones otherwise.

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
    folder = open_checkpoint(source_dir)
    source = _open_source(folder, FORMATS[format], scale_rule, preset, modules_to_not_convert)
    target = _format_for(source, FORMATS[format])
    written = _written(source, target, scale_rule, on_mismatch)
    decisions = {layer: decide(target, source, written, shape, on_mismatch) for layer, shape in source.shapes.items()}
    if any(decision.action == "refused" for decision in decisions.values()):
        raise _refusal(source, target, written, decisions)
    _check_rule_counts(source, scale_rule, decisions)
    quantized = sorted(layer for layer, decision in decisions.items() if decision.is_quantized)
    names = ignored_layers(source, set(quantized)), quantized
    options = target.quantization_config(source.config, *names) if quantized else None
    dtype = model_dtype(folder)
    report = ConversionReport(
        Path(out_dir),
        format,
        "full precision" if _is_plain(source) else source.config.describe(),
        notes=[*target.notes(source.config, *names), *_notes(source, target, decisions, written, dtype)],
        weights=_new_weights(source, written, decisions),
        against=PACKED if isinstance(source, PackedSource) else ORIGINAL,
        source_sqnr_db=source.sqnr_db if isinstance(source, PackedSource) else None,
        file="export_report.json",
    )
    return convert(
        source,
        out_dir,
        {layer: exported_layer(source, layer, target, decision, written) for layer, decision in decisions.items()},
        target.others(source.plain_rest() if target.plain_names else source.model_rest(), dtype),
        _config(folder.config, options),
        report,
        write=target.write,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        on_bytes=on_bytes,
    )


def option(name: str, value: Any) -> str:
    """Return an argument with its value, and the option of the command in brackets."""
    flag = {"modules_to_not_convert": "skip"}.get(name, name.replace("_", "-"))
    values = [value] if isinstance(value, str) else value
    return f"{name}={value!r} ({' '.join(f'--{flag} {one}' for one in values)})"


def _open_source(
    folder, format: Format, scale_rule: str | None, preset: str | None, skips: Sequence[str] | None
) -> LayerSource:
    own = own_config(folder)
    if own is None:
        return MasterSource(folder, _plain_config(format, scale_rule, preset, skips))
    for name, value in (("preset", preset), ("modules_to_not_convert", skips)):
        if value is not None:
            raise CheckpointError(
                f"{folder.path} has a scheme of its own ({own.describe()}); leave out {option(name, value)}"
            )
    return PackedSource(folder) if own.mode == "packed" else MasterSource(folder)


def _plain_config(
    format: Format, scale_rule: str | None, preset: str | None, skips: Sequence[str] | None
) -> MXFP4RLConfig:
    """Return the scheme for a plain checkpoint."""
    if preset == "w4a4" and not format.quantizes_activations:
        raise CheckpointError(
            f"{option('preset', 'w4a4')} has no effect in format {format.name!r}, whose engines compute activations in "
            f"full precision; leave it out, or use {option('format', 'quark')}"
        )
    return MXFP4RLConfig(
        mode="packed",
        preset=preset or "w4a16",
        scale_rule=scale_rule or DEFAULT_RULE,
        macro_block=None,
        modules_to_not_convert=skips,
    )


def _format_for(source: LayerSource, format: Format) -> Format:
    """Return the format for the checkpoint. Raises [`CheckpointError`] if it cannot hold its architecture or
    rotation."""
    path = source.folder.path
    if reason := format.architecture_misfit(source.model.config):
        raise CheckpointError(f"format {format.name!r} cannot hold {path}: {reason}")
    if source.config.weight_rotation is not None and isinstance(format, PackedFormat):
        raise CheckpointError(
            f"{path} has a scheme whose products rotate both operands ({source.config.weight_rotation}), and format "
            f"{format.name!r} cannot hold rotated weights. Format 'bf16' can, dequantized and rotated back; for 4 bits "
            "elsewhere, export the checkpoint that they were made from (hf-mxfp4 gptq --scheme even)"
        )
    return format.for_checkpoint(source.folder, source.model)


def plain_scheme(scheme: QuantScheme, scale_rule: str | None = None) -> QuantScheme:
    """Return the scheme without macro factors and outlier fallback: the same blocks, and the same rule unless one is
    given."""
    return QuantScheme(ScaleRule(scale_rule or scheme.scale_rule), block_rows=scheme.block_rows)


def _is_plain(source: LayerSource) -> bool:
    return isinstance(source, MasterSource) and source.is_plain


def _written(source: LayerSource, format: Format, scale_rule: str | None, on_mismatch: str) -> QuantScheme:
    """Return the scheme of weights that are quantized by the export."""
    scheme = source.config.weight_scheme
    misfits = isinstance(format, PackedFormat) and bool(format.misfits(scheme))
    again = scale_rule is not None or misfits and on_mismatch == "requantize"
    return plain_scheme(scheme, scale_rule) if again or not isinstance(source, MasterSource) else scheme


def _check_rule_counts(source: LayerSource, scale_rule: str | None, decisions: Mapping[str, Decision]) -> None:
    done = any(decision.action in ("packed", "requantized") for decision in decisions.values())
    if scale_rule is None or done or _is_plain(source):
        return
    values = "packed bytes are kept" if isinstance(source, PackedSource) else "quantized values are written"
    raise CheckpointError(
        f"{option('scale_rule', scale_rule)} has no effect here: the {values} as {source.folder.path} has them "
        f"({source.config.weight_scheme}). Leave it out, or export the original full-precision checkpoint with it"
    )


def _new_weights(source: LayerSource, written: QuantScheme, decisions: Mapping[str, Decision]) -> str | None:
    """Return the scheme of the weights written, if it is new to them."""
    actions = {decision.action for decision in decisions.values()}
    return str(written) if actions & {"packed", "requantized"} or _is_plain(source) else None


def ignored_layers(source: LayerSource, quantized: Set[str]) -> list[str]:
    """Return the names of everything that an engine may take for a linear layer and that is not quantized, sorted.

    These are the model's linear layers, and the matrices in the files that are neither embeddings nor of such a layer:
    experts have one each there while the model keeps them in one.
    """
    shapes = {tensor.name: tensor.shape for tensor in source.plain_rest()}
    for layer, shape in source.shapes.items():
        if layer not in quantized:
            tensors = plain_tensors(source.in_plain_files(layer), shape, shape.meta())
            shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    modules = dict(source.model.named_modules(remove_duplicate=False))
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    matrices = {
        name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2
    }
    embeddings = {name for name, module in modules.items() if isinstance(module, nn.Embedding)}
    embeddings |= {source.names.stored.get(f"{name}.weight", "").removesuffix(".weight") for name in embeddings}
    return sorted((linears | matrices) - embeddings - quantized)


def _refusal(
    source: LayerSource, format: PackedFormat, written: QuantScheme, decisions: Mapping[str, Decision]
) -> CheckpointError:
    refused = {layer: decision.reason for layer, decision in decisions.items() if decision.action == "refused"}
    odd = {layer: reason for layer, reason in refused.items() if reason}
    masters, plain = isinstance(source, MasterSource), _is_plain(source)
    parts = format.misfits(written if masters else source.config.weight_scheme)
    reasons = [f"it has no place for {' and '.join(parts)}"] if parts else []
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        reasons.append(f"of {min(odd)}{more}, {odd[min(odd)]}")
    n_refused, n_layers = (sum(source.shapes[layer].n_matrices for layer in layers) for layers in (refused, decisions))
    scheme = "" if plain else f" ({source.config.weight_scheme})"
    requantize, dequantize = (option("on_mismatch", choice) for choice in ("requantize", "dequantize"))
    even = option("scale_rule", DEFAULT_RULE)
    if not parts:
        advice = f"{dequantize} {'leaves them in' if plain else 'makes them'} bfloat16, listed as not quantized"
    elif masters:
        advice = (
            f"Best: {even} quantizes the full-precision weights straight to plain MXFP4, once; {requantize} does so "
            f"with their own rule ({plain_scheme(source.config.weight_scheme)}). Neither is exactly the policy that "
            f"was trained; {dequantize} is, in bfloat16, which costs memory"
        )
    else:
        advice = (
            f"Best: export the original full-precision checkpoint instead, plain or trained, with {even}: its weights "
            f"are then quantized once. {requantize} makes plain MXFP4 ({written}) of the packed ones, which quantizes "
            f"twice and costs much more accuracy; {dequantize} makes bfloat16, which costs memory"
        )
    return CheckpointError(
        f"format {format.name!r} cannot hold {n_refused} of {n_layers} layers of {source.folder.path}{scheme}: "
        f"{'; '.join(reasons)}. {advice}"
    )


def _notes(
    source: LayerSource, format: Format, decisions: Mapping[str, Decision], written: QuantScheme, dtype: torch.dtype
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
    if "packed" in actions and not _is_plain(source) and written != source.config.weight_scheme:
        notes.append(
            f"The policy was trained with weights in {source.config.weight_scheme}; the exported ones are "
            f"{written}, quantized once from its full-precision weights."
        )
    if dtype != torch.bfloat16:
        notes.append(f"All other tensors are converted from {dtype} to bfloat16, what other engines compute in.")
    if isinstance(format, PackedFormat) and set(actions) <= {"dequantized", "left"}:
        notes.append("No layer is MXFP4 any more: this is a plain checkpoint, as format bf16 writes it.")
    return notes


def _config(config: Mapping[str, Any], options: dict[str, Any] | None) -> dict[str, Any]:
    """Return the `config.json` of a bfloat16 model, with another `quantization_config` or none."""
    rest = _in_bf16(without_scheme(config))
    return rest if options is None else {**rest, "quantization_config": options}


def _in_bf16(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {k: "bfloat16" if k in ("dtype", "torch_dtype") and v is not None else _in_bf16(v) for k, v in value.items()}
