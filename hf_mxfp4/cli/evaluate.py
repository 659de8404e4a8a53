# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 eval`, `smooth` and `gptq`: perplexity of schemes on a text, and checkpoints prepared for quantization."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import checkpoint, lab
from .common import (
    DeviceOption,
    JsonOption,
    MaxLengthOption,
    ModelArgument,
    OutArgument,
    OverwriteOption,
    SamplesOption,
    TextFieldOption,
    fail,
    note,
    print_json,
    print_table,
    report_folder,
    say,
    work_progress,
)


TextOption = Annotated[
    str, typer.Option("--text", metavar="TEXT", help="Texts like those that the model is for; as for hf-mxfp4 eval.")
]
#: What a checkpoint without a scheme of its own is measured under where nothing is asked for.
DEFAULT_SCHEMES = ("w4a16:rceil", "w4a16:even+mbs128-blockwise", "rceil", "even+mbs128-blockwise", "default")


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a model on the Hugging Face Hub.")
    ],
    text: Annotated[
        str,
        typer.Option(
            "--text",
            metavar="TEXT",
            help="JSON lines, a .txt or .md file, a folder of Dataset.save_to_disk, or a dataset on the Hub as "
            "NAME:SPLIT or NAME:CONFIG:SPLIT.",
        ),
    ],
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            metavar="SCHEME",
            help="'w4a16:SCHEME' (weights alone), 'w4a8:SCHEME' (activations in E4M3), 'w4a8:SCHEME/mxfp8' (in MXFP8), "
            "'w4a4:SCHEME' or SCHEME (weights and activations), "
            "'w4a4:WEIGHTS/ACTIVATIONS' (a scheme each), 'default' or a preset with its usual options, 'own' (that of "
            "the checkpoint), or 'config:FILE' (options of MXFP4RLConfig, JSON or YAML); SCHEME as for analyze, also "
            "with mbs128-hybrid. Repeatable.",
            show_default="own, or five usual ones",
        ),
    ] = None,
    without_each: Annotated[
        Literal["type", "layer"] | None,
        typer.Option(
            help="Also measure the first scheme with each part of the model left in full precision in turn: all layers "
            "of a 'type', or a decoder 'layer'. It takes a pass over the texts for each.",
        ),
    ] = None,
    text_field: TextFieldOption = None,
    samples: SamplesOption = 100,
    max_length: MaxLengthOption = 512,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Compare with this model of the same tokens, and not with MODEL in full precision; needed for KL "
            "where MODEL stores quantized weights.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], typer.Option(help="[default: that of the checkpoint]")
    ] = "auto",
    device: DeviceOption = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the reports. [default: evaluation/<model name>]")] = None,
    overwrite: OverwriteOption = False,
    card: Annotated[
        bool, typer.Option("--card", help="Put the figures of the checkpoint's own scheme into its model card.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity on a text, in full precision and under each scheme, with the divergence of the predictions
    (KL) and paired differences, and write a report.

    The weights are loaded once. An interrupted run resumes when the same command is given again; results of a finished
    one are used again where other schemes are added.
    """
    folder = Path(model).expanduser()
    if card and not folder.is_dir():
        fail("--card writes into a checkpoint's folder; MODEL is none")
    text_options = lab.TextOptions(text, text_field, samples, max_length)
    texts = text_options.read()
    if card:
        try:
            checkpoint.read_generated(folder)
        except (FileNotFoundError, ValueError) as error:
            fail(f"--card: {error}")
    note(f"loading {model} into memory")
    loaded = lab.load(model, dtype, device)
    other = None if reference is None else lab.load(reference, dtype, device)
    batches = lab.texts_to_predict(text_options, loaded.tokenizer, texts)
    schemes = _schemes(loaded, scheme, card)
    if without_each is not None:
        if not schemes:
            fail("--without-each needs a scheme, and weights that are in full precision")
        schemes += lab.without_each(schemes[0], loaded.model, without_each)
    out = out or Path("evaluation") / report_folder(model)
    log = out / "progress.jsonl"
    rows = 1 + len(schemes) + (other is not None)
    with work_progress(rows * sum(ids.shape[-1] - 1 for ids in batches), "tokens") as progress:
        evaluation = lab.evaluate_checkpoint(
            loaded, text, batches, schemes, other, log, overwrite=overwrite, on_tokens=progress
        )
    reports = lab.reports
    paths = reports.write_evaluation(evaluation, out)
    if as_json:
        print_json(evaluation.to_dict())
    else:
        title = reports.evaluation_title(evaluation)
        print_table(title, reports.evaluation_columns(evaluation), reports.evaluation_table(evaluation))
        say(reports.evaluation_legend(evaluation))
    if card:
        reports.add_perplexity(folder, evaluation.to_dict())
        note(f"{folder / 'README.md'} has the figures")
    note(f"reports: {', '.join(map(str, paths))}")


def _schemes(loaded: Any, wanted: list[str] | None, card: bool) -> "list[lab.ModelScheme]":
    """Return the schemes to measure: the wanted ones, or the usual ones for such a checkpoint."""
    if wanted is None:
        wanted = list(DEFAULT_SCHEMES)
        if loaded.stored:
            wanted = []
        elif loaded.own is not None:
            wanted = ["own"]
    if card and not loaded.stored:  # first, since equal schemes are measured under the first name
        wanted = ["own", *(name for name in wanted if name != "own")]
    return lab.read_schemes(wanted, loaded.own)


def smooth(
    model: ModelArgument,
    out: OutArgument,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="TEXT",
            help="Texts to measure activations on, as for hf-mxfp4 eval.",
            show_default="random tokens",
        ),
    ] = None,
    text_field: TextFieldOption = None,
    samples: SamplesOption = 32,
    max_length: MaxLengthOption = 512,
    strength: Annotated[float, typer.Option(min=0, max=1, help="0 makes weights alike, 1 activations.")] = 0.3,
    device: DeviceOption = "auto",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Scale the channels of activations by powers of two, and the weights that read them by the inverse: the model
    computes the same, bit for bit, and loses less when activations are quantized too.

    What comes out is a plain checkpoint, for training, packing and export as any other.
    """
    if text is None and (text_field, samples, max_length) != (None, 32, 512):
        fail("--text-field, --samples and --max-length are of texts; add --text, or leave them out")
    options = None if text is None else lab.TextOptions(text, text_field, samples, max_length)

    def smooth(loaded, batches):
        return lab.smooth_model(loaded, batches, strength)

    smoothing = lab.rewrite_checkpoint(model, out, options, smooth, device=device, overwrite=overwrite)
    if as_json:
        print_json(asdict(smoothing))
        return
    say(f"{out}: {smoothing}; the logits are the same bit for bit")


def gptq(
    model: ModelArgument,
    out: OutArgument,
    text: TextOption,
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",  # typer 0.27 would call it --SCHEME
            metavar="SCHEME",
            help="What weights will be quantized to, as for hf-mxfp4 eval; of fallback with whole residuals (of1) "
            "alone. 'even' for exports to plain MXFP4.",
        ),
    ] = "even+mbs128-blockwise_fp8",
    text_field: TextFieldOption = None,
    samples: SamplesOption = 128,
    max_length: MaxLengthOption = 512,
    device: DeviceOption = "auto",
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Round the weights of a model onto the 4-bit grid of a scheme, column by column, so that what each rounding loses
    is made up for by the columns that follow (GPTQ).

    What comes out is a plain checkpoint, which loses nothing more when its weights are quantized under that scheme: for
    packing, LoRA on packed weights, and export.
    """
    config = lab.read_schemes([scheme])[0].config

    options = lab.TextOptions(text, text_field, samples, max_length)

    def round_weights(loaded, batches):
        return lab.round_model(loaded, batches, config)

    rounding = lab.rewrite_checkpoint(model, out, options, round_weights, device=device, overwrite=overwrite)
    if as_json:
        print_json(asdict(rounding))
        return
    say(
        f"{out}: {len(rounding.layers)} layers rounded for {scheme}; the errors of their outputs are "
        f"{rounding.gain_db:.1f} dB below those of the nearest values"
    )
    if rounding.left:
        say(f"left alone: {', '.join(rounding.left)}")
