# SPDX-License-Identifier: Apache-2.0
"""What commands share: options, how errors are reported, progress on standard error, tables on standard output."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from typer.core import TyperCommand

import hf_mxfp4
from mxfp4_kernels.scale_rules import SCALE_RULES

from ..files import json_clean, printable


SchemeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        metavar="SCHEME",
        help="How tensors are quantized, such as 'rceil+mbs128-static+of0.5': a scale rule "
        f"({', '.join(SCALE_RULES)}), then macro blocks (mbs128-static, -dynamic, -blockwise, -blockwise_fp8) and "
        "outlier fallback (of0.5) as wanted; or 'nvfp4'. Repeatable.",
    ),
]
SkipOption = Annotated[
    list[str] | None,
    typer.Option(
        "--modules-to-not-convert",
        "--skip",
        metavar="PATTERN",
        help="Tensors or layers to leave out, in full precision: those whose names have these whole dotted parts "
        "('layers.0', 'mlp.down_proj'), or 're:<regex on the full name>'. Repeatable.",
    ),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint's folder, a .safetensors file, or a model on the Hugging Face Hub, which is downloaded to "
        "the usual cache.",
    ),
]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a model on the Hub, in full precision.")
]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: a new or an empty one.")]
TextFieldOption = Annotated[
    str | None, typer.Option(help="Field of the texts, or several with commas between. [default: the usual names]")
]
SamplesOption = Annotated[int, typer.Option(min=1, help="Texts, or windows of a running text.")]
MaxLengthOption = Annotated[int, typer.Option(min=2, help="Tokens per text or window.")]
DeviceOption = Annotated[str, typer.Option(help="'cpu', 'cuda', ...", show_default="a GPU if any")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for scripts.")]

#: Seconds before and between lines of progress where there is no terminal.
LINE_SECONDS = 10.0
#: Columns assumed where there is no terminal, so that tables in files and pipes are not cut.
_PLAIN_WIDTH = 200
#: Commands that keep what they have done.
_RESUMABLE = ("analyze", "eval")


class Command(TyperCommand):
    """A command in which an error that a user can fix gives a message and exit code 2, and Ctrl-C 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ImportError, ValueError) as error:  # an extra that is not installed; wrong input
            fail(str(error))
        except OSError as error:
            fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        except RecursionError:
            fail("a file is nested too deeply to be read")
        except KeyboardInterrupt:
            kept = "nothing was written"
            if self.name in _RESUMABLE:
                kept = "the same command resumes where it stopped"
            typer.echo(f"\ninterrupted; {kept}", err=True)
            raise typer.Exit(130) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            # Path.expanduser() would raise a RuntimeError.
            if word.startswith("~") and os.path.expanduser(word) == word:
                fail(f"{word}: there is no such home folder")
        return super().parse_args(ctx, args)


def fail(message: str, code: int = 2) -> NoReturn:
    """Say on standard error why there is no result, and leave."""
    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(code)


def note(text: str) -> None:
    """Print a line about what is done on standard error."""
    typer.echo(printable(text), err=True)


def schemes_of(texts: Sequence[str]) -> list[Any]:
    """Read the schemes that the user named, each once. Raises `ValueError` when one cannot be read."""
    return list(dict.fromkeys(hf_mxfp4.numerics.parse_scheme(text) for text in texts))


def report_folder(model: str) -> str:
    """Return a folder name for the reports of a model: its hub id, or the last two parts of its path."""
    path = Path(model).expanduser()
    parts = model.split("/")
    if path.exists():
        parts = [part for part in path.resolve().parts[-2:] if part != "/"]
    return "--".join(parts) or "model"


@contextlib.contextmanager
def work_progress(total: int, unit: str = "B") -> Iterator[Callable[[int, str], None]]:
    """Show how much of a total is done; gives what to call with an amount and what it belongs to."""
    seconds = 0.1 if sys.stderr.isatty() else LINE_SECONDS
    with tqdm(total=total, unit=unit, unit_scale=True, leave=False, mininterval=seconds, delay=seconds) as bar:

        def done(amount: int, name: str) -> None:
            bar.set_description_str(printable(name[-40:]), refresh=False)
            bar.update(amount)

        yield done


def screen() -> Console:
    """Return standard output as it is now; as wide as a table needs where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)


def print_table(title: str, headings: Sequence[str], *sections: Sequence[Sequence[str]]) -> None:
    """Print a table: text left, numbers right; a line between sections of rows. Nothing in it is read as markup."""
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(Text(printable(heading)), justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for rows in sections:
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        table.add_section()
    screen().print(table)


def say(text: str) -> None:
    """Print a line as it is: no markup, no control characters, no line breaks of ours. Nothing for an empty one."""
    if text:
        screen().print(printable(text), markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value on standard output; numbers that do not exist are null."""
    print(json.dumps(json_clean(value), indent=1, allow_nan=False))


def report_problems(problems: Sequence[Any]) -> None:
    """Print every problem on standard error, one line each."""
    for problem in problems:
        print(printable(f"problem: {problem.where}: {problem.reason}"), file=sys.stderr)
