# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 analyze`: what quantization does to every weight of a checkpoint."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    ExcludeOption,
    IncludeOption,
    JsonOption,
    SchemeOption,
    fail,
    report_folder,
    schemes_of,
    told_errors,
)


if TYPE_CHECKING:
    from ..config import MXFP4RLConfig
    from ..lab.errors.results import Analysis
    from ..lab.errors.source import Source
    from ..lab.texts import TextOptions
    from ..numerics import QuantScheme


PROGRESS_NAME, PERPLEXITY_PROGRESS_NAME = "progress.jsonl", "perplexity_progress.jsonl"


def analyze(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint's folder, a .safetensors file, or a model on the Hugging Face Hub (its files are "
            "downloaded to the usual cache one at a time, each analysed before the next).",
        ),
    ],
    scheme: SchemeOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the reports. [default: analysis/<model name>]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget what an earlier run left in --out.")] = False,
    activations: Annotated[
        bool,
        typer.Option(
            "--activations",
            help="Also load the whole model into memory, run it on texts of --text, and analyse what enters the "
            "layers.",
        ),
    ] = False,
    text: Annotated[
        str | None, typer.Option("--text", help="The texts for --activations: JSON lines, or what eval takes.")
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option("--text-field", help="Field of the texts. [default: text, prompt, question or content]"),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Texts to run.")] = 8,
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Tokens per text.")] = 512,
    perplexity: Annotated[
        str | None,
        typer.Option(
            "--perplexity",
            metavar="TEXT",
            help="Also load the whole model into memory, and measure perplexity and KL of each scheme, on weights and "
            "activations, on this text; --text as for eval, which has more options.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the MXFP4 error of every weight that would be quantized, and write a report.

    Schemes default to the checkpoint's own, or, for one that has none, to plain MXFP4 and the two corrections of arXiv
    2605.20402. An interrupted run resumes when the same command is given again.
    """
    if activations != (text is not None):
        fail("--activations and --text go together")
    wanted = schemes_of(scheme) if scheme else None
    with told_errors("the same command resumes where it stopped"):
        from ..lab.errors.source import SourceError, open_source
        from ..lab.errors.weights import own_config
        from ..lab.texts import TEXT_FIELDS, TextOptions

        options = TextOptions(text or "", text_field, samples, max_length, TEXT_FIELDS)
        texts = [] if text is None else options.read()
        predicted = TextOptions(perplexity or "", text_field, samples, max_length)
        predicted_texts = [] if perplexity is None else predicted.read()
        source = open_source(model)
        if predicted_texts and source.kind == "file":
            raise SourceError("--perplexity needs a model's folder or hub id, with its config and tokenizer")
        own = own_config(source)
        folder = out or Path("analysis") / report_folder(model)
        analysis = _analyze_weights(source, own, wanted, include or (), exclude or (), folder, overwrite)
        if texts:
            _add_activations(analysis, model, own, wanted, options, texts)
        if predicted_texts:
            _add_perplexity(analysis, model, own, wanted, predicted, predicted_texts, folder, overwrite)
        _finish(analysis, source, folder, as_json)
    if analysis.problems:
        raise typer.Exit(1)


def _default_schemes(own: "MXFP4RLConfig | None", kind: str) -> list["QuantScheme"]:
    from ..lab.errors.schemes import PAPER_SCHEMES

    if own is None:
        return schemes_of(PAPER_SCHEMES)
    return [own.weight_scheme if kind == "weight" else own.activation_scheme or own.weight_scheme]


def _analyze_weights(source: "Source", own, wanted, include, exclude, folder: Path, overwrite: bool) -> "Analysis":
    from .. import __version__
    from ..lab.errors.progress import ProgressLog
    from ..lab.errors.weights import analyze_weights, bytes_to_analyze, selection_for
    from .console import ByteProgress

    schemes = wanted or _default_schemes(own, "weight")
    selection = selection_for(source, include, exclude, own)
    with ProgressLog(
        folder / PROGRESS_NAME, source.name, [str(s) for s in schemes], __version__, overwrite=overwrite
    ) as log:
        if len(log):
            typer.echo(f"{folder / PROGRESS_NAME} holds {len(log)} tensors that are done", err=True)
        if source.kind == "hub":
            typer.echo(f"{len(source.shards)} files of {source.name} are downloaded one at a time", err=True)
        with ByteProgress(bytes_to_analyze(source, selection)) as progress:
            return analyze_weights(source, schemes, selection, progress=log, on_bytes=progress)


def _add_activations(analysis: "Analysis", model: str, own, wanted, options: "TextOptions", texts: list[str]) -> None:
    from ..lab.errors.activations import analyze_activations, load_for_activations
    from ..module_names import fused_experts

    typer.echo(f"loading the whole model into memory to run {len(texts)} texts", err=True)
    network, tokenizer = load_for_activations(model)
    batches = options.tokens(tokenizer, texts)
    results, problems = analyze_activations(network, batches, wanted or _default_schemes(own, "activation"))
    analysis.results += results
    analysis.problems += problems
    tokens = sum(batch.shape[-1] for batch in batches)
    precision = "quantized as its config says" if own else f"in {str(network.dtype).removeprefix('torch.')}"
    analysis.notes.append(f"Activations: {len(batches)} texts, {tokens} tokens, with the model {precision}.")
    if experts := fused_experts(network):
        analysis.notes.append(
            f"Activations: {len(experts)} modules keep their experts in fused weights, not in linear layers; "
            "what enters them is not among the numbers."
        )


def _add_perplexity(
    analysis: "Analysis",
    model: str,
    own,
    wanted,
    options: "TextOptions",
    texts: list[str],
    folder: Path,
    overwrite: bool,
) -> None:
    from ..lab.perplexity.checkpoint import Job, texts_to_predict
    from ..lab.perplexity.load import load
    from ..lab.perplexity.schemes import read_schemes
    from .evaluate import measured

    typer.echo(f"loading the whole model into memory to measure perplexity on {len(texts)} texts", err=True)
    loaded = load(model)
    names = ["own"] if own is not None and not wanted else map(str, wanted or _default_schemes(own, "weight"))
    schemes = read_schemes([name.removeprefix("mxfp4+") for name in names], loaded.own)
    job = Job(loaded, options, texts_to_predict(options, loaded.tokenizer, texts), schemes)
    analysis.evaluation = measured(job, folder / PERPLEXITY_PROGRESS_NAME, overwrite)


def _finish(analysis: "Analysis", source: "Source", folder: Path, as_json: bool) -> None:
    from .. import __version__
    from ..lab.errors.weights import describe_source
    from ..lab.report.files import build_summary, write_reports
    from .console import out, print_summary, report_problems

    facts = describe_source(source)
    paths = write_reports(analysis, facts, __version__, folder)
    if as_json:
        typer.echo(json.dumps(build_summary(analysis, facts), indent=1, allow_nan=False))
    else:
        print_summary(analysis, out())
    report_problems(analysis.problems)
    typer.echo(f"reports: {', '.join(str(path) for path in paths)}", err=True)
