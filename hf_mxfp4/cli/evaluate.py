# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 eval`: perplexity of schemes on a text, and their divergence from full precision."""

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption, fail, report_folder, told_errors


if TYPE_CHECKING:
    from ..lab.perplexity.checkpoint import Job
    from ..lab.perplexity.load import Loaded
    from ..lab.perplexity.results import Evaluation
    from ..lab.perplexity.schemes import ModelScheme


#: What a checkpoint without a scheme of its own is measured under where nothing is asked for.
DEFAULT_SCHEMES = ("w4a16:rceil", "w4a16:even+mbs128-blockwise", "rceil", "even+mbs128-blockwise", "default")


class Dtype(str, Enum):
    """The names in [`hf_mxfp4.lab.perplexity.load.DTYPES`]."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Unit(str, Enum):
    """What a part of a model is, see [`hf_mxfp4.lab.perplexity.schemes.without_each`]."""

    TYPE = "type"
    LAYER = "layer"


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
            help="'w4a16:SCHEME' (weights alone), 'w4a4:SCHEME' or SCHEME (weights and activations), "
            "'w4a4:WEIGHTS/ACTIVATIONS' (a scheme each), 'default' or a preset with its usual options, 'own' (that of "
            "the checkpoint), or 'config:FILE' (options of MXFP4RLConfig, JSON or YAML); SCHEME as for analyze, also "
            "with mbs128-hybrid, and @RATE after the fallback. Repeatable.",
            show_default="own, or five usual ones",
        ),
    ] = None,
    without_each: Annotated[
        Unit | None,
        typer.Option(
            "--without-each",
            help="Also measure the first scheme with each part of the model left in full precision in turn: all layers "
            "of a 'type', or a decoder 'layer'. It takes a pass over the texts for each.",
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            help="Field of the texts, or several with commas between, which are joined by line breaks.",
            show_default="text, question,answer, prompt,completion, prompt, question or content",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Texts, or windows of a running text.")] = 100,
    max_length: Annotated[int, typer.Option("--max-length", min=2, help="Tokens per text or window.")] = 512,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="MODEL",
            help="Compare with this model of the same tokens, and not with MODEL in full precision; needed for KL "
            "where MODEL stores quantized weights. It is loaded too.",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="[default: that of the checkpoint]")] = Dtype.AUTO,
    device: Annotated[
        str, typer.Option("--device", help="'cpu', 'cuda', ... [default: a GPU if there is one]")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the reports. [default: evaluation/<model name>]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget what an earlier run left in --out.")] = False,
    card: Annotated[
        bool,
        typer.Option("--card", help="Put the figures of the checkpoint's own scheme into its model card (README.md)."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity on a text, in full precision and under each scheme, with the divergence of the predictions
    (KL) and paired differences, and write a report.

    The weights are loaded once; logits never exist for a whole text. An interrupted run resumes when the same command
    is given again. Other schemes can be added to a finished one: the report keeps those of before.
    """
    with told_errors("the same command resumes where it stopped"):
        if card and not Path(model).expanduser().is_dir():
            fail("--card writes into a checkpoint's folder; MODEL is none")
        from ..lab.perplexity.checkpoint import PROGRESS_NAME, Job, texts_to_predict
        from ..lab.perplexity.load import load
        from ..lab.perplexity.schemes import without_each as parts_left_out
        from ..lab.texts import TextOptions

        options = TextOptions(text, text_field, samples, max_length)
        texts = options.read()
        if card:
            _check_card(Path(model).expanduser())
        typer.echo(f"loading {model} into memory", err=True)
        loaded = load(model, dtype.value, device)
        other = None if reference is None else load(reference, dtype.value, device)
        batches = texts_to_predict(options, loaded.tokenizer, texts)
        schemes = _schemes(loaded, scheme, card)
        if without_each is not None:
            if not schemes:
                fail("--without-each needs a scheme, and weights that are in full precision")
            schemes += parts_left_out(schemes[0], loaded.model, without_each.value)
        job = Job(loaded, options, batches, schemes, other)
        folder = out or Path("evaluation") / report_folder(model)
        evaluation = measured(job, folder / PROGRESS_NAME, overwrite)
        _finish(evaluation, folder, Path(model).expanduser() if card else None, as_json)


def measured(job: "Job", log_path: Path, overwrite: bool) -> "Evaluation":
    """Run a job with its log and progress on standard error."""
    from .console import TokenProgress

    with job.open_log(log_path, overwrite) as log:
        if len(log):
            typer.echo(f"{log_path} holds {len(log)} results that are done", err=True)
        job = job.with_earlier(log)
        with TokenProgress(job.total) as progress:
            return job.run(log, progress)


def _schemes(loaded: "Loaded", wanted: list[str] | None, card: bool) -> "list[ModelScheme]":
    from ..lab.perplexity.schemes import read_schemes

    if wanted is None:
        wanted = [] if loaded.stored else ["own"] if loaded.own is not None else list(DEFAULT_SCHEMES)
    if card and not loaded.stored and "own" not in wanted:
        wanted = ["own", *wanted]
    return read_schemes(wanted, loaded.own)


def _check_card(folder: Path) -> None:
    from ..checkpoint.card.model import read_generated
    from ..lab.errors.source import SourceError

    try:
        read_generated(folder)
    except (FileNotFoundError, ValueError) as error:
        raise SourceError(f"--card: {error}") from error


def _finish(evaluation: "Evaluation", folder: Path, card: Path | None, as_json: bool) -> None:
    from .. import __version__
    from ..checkpoint import add_perplexity
    from ..files import json_clean
    from ..lab.perplexity.report import write_reports
    from .console import out, print_evaluation

    paths = write_reports(evaluation, __version__, folder)
    if as_json:
        typer.echo(json.dumps(json_clean(evaluation.to_dict()), indent=1, allow_nan=False))
    else:
        print_evaluation(evaluation, out())
    if card is not None:
        add_perplexity(card, evaluation.to_dict())
        typer.echo(f"{card / 'README.md'} has the figures", err=True)
    typer.echo(f"reports: {', '.join(str(path) for path in paths)}", err=True)
