# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and how their mistakes are told."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer


if TYPE_CHECKING:
    from ..numerics import QuantScheme


SchemeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        metavar="SCHEME",
        help="How tensors are quantized, such as 'rceil+mbs128-static+of0.5': a scale rule (rceil, floor, even, mse), "
        "then macro blocks (mbs128-static, -dynamic, -blockwise) and outlier fallback (of0.5) as wanted. Repeatable.",
    ),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Only tensors whose name has these whole dotted parts ('layers.0', 'mlp.down_proj'), or 're:<regex on "
        "the full name>'. Repeatable.",
    ),
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Tensors to leave out; as --include.")
]
#: Of commands that make a checkpoint in full precision from another, on texts.
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a model on the Hub, in full precision.")
]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the new checkpoint.")]
LikelyTextOption = Annotated[
    str, typer.Option("--text", metavar="TEXT", help="Texts like those that the model is for; as for hf-mxfp4 eval.")
]
TextFieldOption = Annotated[str | None, typer.Option("--text-field", help="Field of the texts, as for hf-mxfp4 eval.")]
SamplesOption = Annotated[int, typer.Option("--samples", min=1, help="Texts, or windows of a running text.")]
MaxLengthOption = Annotated[int, typer.Option("--max-length", min=2, help="Tokens per text or window.")]
DeviceOption = Annotated[str, typer.Option("--device", help="'cpu', 'cuda', ...", show_default="a GPU if any")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in OUT.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for scripts.")]


def fail(message: str, code: int = 2) -> NoReturn:
    """Say on standard error why there is no result, and leave."""
    from ..files import printable

    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(code)


def schemes_of(texts: Sequence[str]) -> list["QuantScheme"]:
    """The schemes that the user named, each once; leaves with a message when one cannot be read."""
    from ..analysis.errors.schemes import parse_scheme

    try:
        return list(dict.fromkeys(parse_scheme(text) for text in texts))
    except ValueError as error:
        fail(str(error))


def report_folder(model: str) -> str:
    """Return a folder name for the reports of a model: its hub id, or the last two parts of its path, so that
    ``run1/policy`` and ``run2/policy`` have one each."""
    path = Path(model).expanduser()
    parts = [part for part in path.resolve().parts[-2:] if part != "/"] if path.exists() else model.split("/")
    return "--".join(parts) or "model"


@contextlib.contextmanager
def told_errors(when_interrupted: str) -> Iterator[None]:
    """Turn what a user can mend into a message and exit code 2, and Ctrl-C into a message and 130."""
    from ..analysis.errors.source import SourceError
    from ..analysis.resume_log import ProgressMismatch

    try:
        yield
    except (SourceError, ProgressMismatch) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted; {when_interrupted}", err=True)
        raise typer.Exit(130) from None
