# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 pack`, `export`, `import` and `verify`: packed checkpoints, other engines' formats, and checksums."""

import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import hf_mxfp4
from mxfp4_kernels.scale_rules import SCALE_RULES, ScaleRule

from .. import checkpoint
from .common import (
    CheckpointArgument,
    JsonOption,
    OutArgument,
    OverwriteOption,
    SkipOption,
    fail,
    note,
    print_json,
    print_table,
    say,
    work_progress,
)


DtypeOption = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option(
        help="Of embeddings, head and all that is not quantized: by default bfloat16; pack keeps a plain one's."
    ),
]

_HOW = "save_pretrained, hf-mxfp4 pack, export and import write them; hf-mxfp4 verify --add does for a folder as it is"


def pack(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint, trained with mode='qat' or a plain one.")
    ],
    out: OutArgument,
    preset: Annotated[str | None, typer.Option(help="'w4a16' (default), 'w4a8' or 'w4a4'.")] = None,
    scale_rule: Annotated[str | None, typer.Option(help=f"{', '.join(SCALE_RULES)} (default: even).")] = None,
    macro_block: Annotated[str | None, typer.Option(help="32, 64, 128 (default), 256, row or none.")] = None,
    macro_search: Annotated[
        str | None,
        typer.Option(help="block_mantissas_fp8 (default but for w4a4), block_mantissas, static, dynamic, hybrid."),
    ] = None,
    outlier_fallback: Annotated[
        float | None, typer.Option(help="Weight of the residual, as 0.5 (default: none).")
    ] = None,
    rotation: Annotated[
        str | None,
        typer.Option(help="Rotate weights and inputs by blocks: deterministic-16, -32, -64 or -128 (default: none)."),
    ] = None,
    dtype: DtypeOption = None,
    skip: SkipOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Pack the weights of a checkpoint into 4 bits, one at a time.

    A checkpoint trained with mode='qat' is packed under its own scheme, a plain one under the options. The result is
    what `hf_mxfp4.pack` and `save_pretrained` give, model card included.
    """
    config = _scheme_for(
        source,
        preset=preset,
        scale_rule=scale_rule,
        macro_block=macro_block,
        macro_search=macro_search,
        outlier_fallback=outlier_fallback,
        fprop=None if rotation is None else {"rotation": rotation},
        modules_to_not_convert=skip,
    )
    with work_progress(_bytes_in(source)) as progress:
        report = checkpoint.pack_checkpoint(source, out, config, dtype=dtype, overwrite=overwrite, on_bytes=progress)
    _show(report, as_json)


def export(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of a checkpoint: plain, trained with mode='qat', or packed."),
    ],
    out: OutArgument,
    format: Annotated[
        Literal["compressed-tensors", "nvfp4", "nvfp4-modelopt", "quark", "gpt-oss", "gguf", "bf16"],
        typer.Option(
            help="compressed-tensors: vLLM, transformers (W4A16); nvfp4: the same, with block mantissas (W4A4 too); "
            "nvfp4-modelopt: NVFP4 for TensorRT-LLM; quark: vLLM (W4A4); gpt-oss: experts of gpt-oss models; gguf: "
            "llama.cpp and what builds on it, in one file; bf16: all.",
        ),
    ] = "nvfp4",
    on_mismatch: Annotated[
        Literal["refuse", "requantize", "dequantize"],
        typer.Option(
            help="Layers that the format cannot hold (macro factors, outlier fallback): refuse, requantize without, or "
            "dequantize to bfloat16. Of a packed checkpoint, rather export the original.",
        ),
    ] = "refuse",
    scale_rule: Annotated[
        ScaleRule | None,
        typer.Option(help="How block scales are chosen: by default even for a plain checkpoint, else its own."),
    ] = None,
    preset: Annotated[
        Literal["w4a16", "w4a4"] | None,
        typer.Option(
            help="What NVFP4 and format quark say of activations: w4a4, the default of a checkpoint whose own are "
            "MXFP4, or w4a16, the default of all others."
        ),
    ] = None,
    dtype: DtypeOption = None,
    skip: SkipOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint in another engine's format, and say what it cost.

    Full-precision weights are quantized once, to plain MXFP4, for nvfp4 with block mantissas. Packed plain MXFP4 keeps
    its bytes; as nvfp4 its values, where E4M3 scales hold them.
    """
    with work_progress(_bytes_in(source)) as progress:
        report = checkpoint.export(
            source,
            out,
            format,
            on_mismatch,
            scale_rule=scale_rule,
            preset=preset,
            dtype=dtype,
            modules_to_not_convert=skip,
            overwrite=overwrite,
            on_bytes=progress,
        )
    _show(report, as_json)


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Folder of an MXFP4 checkpoint of compressed-tensors, AMD Quark or gpt-oss, or an NVFP4 one of "
            "compressed-tensors or NVIDIA Model-Optimizer.",
        ),
    ],
    out: OutArgument,
    activations: Annotated[
        str | None,
        typer.Option(help="How layers take inputs where the checkpoint does not say it: fp8, mxfp8, or a scheme."),
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Turn another engine's MXFP4 checkpoint into a packed one, byte for byte, or an NVFP4 one with the same values."""
    with work_progress(_bytes_in(source)) as progress:
        report = checkpoint.import_checkpoint(
            source, out, activations=activations, overwrite=overwrite, on_bytes=progress
        )
    _show(report, as_json)


def _bytes_in(folder: Path) -> int:
    """Return about what will be read of a checkpoint."""
    files = [folder] if folder.is_file() else [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _scheme_for(source: Path, **options: Any) -> Any:
    """Return the scheme for a plain checkpoint; nothing for one that has its own, unless options contradict that."""
    given = {name: value for name, value in options.items() if value is not None}
    if not given and checkpoint.own_config(checkpoint.open_checkpoint(source)) is not None:
        return None
    if given.get("macro_block") == "none":
        given["macro_block"] = None
    return hf_mxfp4.MXFP4RLConfig(mode="packed", **given)


def _show(report: "checkpoint.ConversionReport", as_json: bool) -> None:
    """Print what was done to each type of layer, what it cost and what it saved, on standard output."""
    from ..lab.errors.layers import conversion_rows

    if as_json:
        print_json(report.to_dict())
        return
    exact, blocks = report.blocks
    if report.changed or any(layer.action != "kept" for layer in report.layers):
        title = report.scheme if report.weights is None else f"weights in {report.weights}"
        headings = ["type of layer", "layers", "what", "SQNR dB: median", "worst", "bits per weight"]
        print_table(title, headings, conversion_rows(report.layers))
    actions = dict(checkpoint.ACTIONS)
    if blocks:
        actions["kept"] = "kept, with rewritten scales"
    counts = ", ".join(f"{count} {actions[action]}" for action, count in report.counts().items())
    say(f"{report.path}: {report.format}, {report.n_layers} layers: {counts}")
    say(f"weights: {report.error()}")
    if blocks:
        say(f"{exact} of {blocks} blocks exact")
    before = checkpoint.bits_per_weight(report.layers, "before")
    after = checkpoint.bits_per_weight(report.layers, "after")
    in_bits = ""
    if before is not None and after is not None:
        in_bits = f"; bits per weight of these layers: {before:.4g} -> {after:.4g}"
    say(f"tensors: {_size(report.bytes_before)} -> {_size(report.bytes_after)}{in_bits}")
    reasons: Counter = Counter()  # why the format left no choice, where the notes do not say it
    for cost in report.layers:
        if cost.reason and not any(cost.reason in note for note in report.notes):
            reasons[cost.action, cost.reason] += cost.matrices
    for (action, reason), count in reasons.items():
        say(f"{count} layers were {checkpoint.ACTIONS[action]}: {reason}.")
    for sentence in report.notes:
        say(sentence)
    if report.file is not None:
        say(f"every layer: {report.path / report.file}")
    say(f"serve it: {report.serve.format(folder=shlex.quote(str(report.path)))}")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def verify(
    model: CheckpointArgument,
    add: Annotated[
        bool,
        typer.Option(
            "--add", help="First record checksums of files that have none, as they are, in mxfp4_manifest.json."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check all files of a checkpoint against the checksums that were written with it, and that the index and
    config.json describe them. Everything that is damaged is named.

    Exit code 0: nothing is. 1: something is. 2: files have no checksums, there is no such checkpoint, or it could not
    be checked.
    """
    from ..lab.errors.source import local_path

    try:
        if add:
            _add(Path(model).expanduser())
        path, _ = local_path(model)
        with work_progress(_bytes_in(path)) as progress:
            found = checkpoint.verify_folder(path, progress)
    except (typer.Exit, OSError, ValueError):
        raise
    except Exception as error:  # exit code 1 means damage and nothing else
        fail(f"{model} could not be checked: {type(error).__name__}: {error}")
    if as_json:
        print_json({"model": model, **found.to_dict()})
    else:
        _show_verification(model, found)
    if found.problems:
        raise typer.Exit(1)
    # Files of the model without checksums; all files if none has one.
    if missing := [name for name in found.unchecked if not found.checked or name.startswith("model")]:
        fail(f"not compared, without checksums: {', '.join(missing)}. {_HOW}")


def _add(folder: Path) -> None:
    if not folder.is_dir():
        fail(f"--add writes into a folder, and {folder} is none")
    before = checkpoint.verify_folder(folder)
    if before.problems:
        _show_verification(str(folder), before)
        fail("no checksums were added to what is damaged", code=1)
    with work_progress(_bytes_in(folder)) as progress:
        added = checkpoint.add_to_folder(folder, progress)
    note(f"checksums added to {len(added)} files")


def _show_verification(model: str, found: "checkpoint.Verification") -> None:
    for problem in found.problems:
        say(problem.reason)
    for line in found.notes:
        say(line)
    if found.checked and found.unchecked:
        say(f"not compared, without checksums: {', '.join(found.unchecked)}")
    if found.checked:
        verdict = "all as it was written"
        if found.problems:
            verdict = f"{len(found.problems)} problems"
        size = f"{found.n_tensors} tensors in {len(found.checked)} files, {found.n_bytes / 1e6:.1f} MB"
        say(f"{model}: {size}: {verdict}")
