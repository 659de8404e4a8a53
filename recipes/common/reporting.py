# SPDX-License-Identifier: Apache-2.0
"""What the recipes print and write down, and how they end: with a message, no traceback, and all processes at once."""

import atexit
import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, Trainer

import hf_mxfp4
from hf_mxfp4.files import printable
from hf_mxfp4.utils import cpu_name


console = Console()
#: Errors of inputs, which a user can fix.
INPUT_ERRORS = (ImportError, OSError, RuntimeError, ValueError)


def tell(subject: str, message: str) -> None:
    """Print a line once per job."""
    if os.environ.get("RANK", "0") == "0":
        console.print(Text.assemble((subject, "bold"), " ", printable(message)), highlight=False, soft_wrap=True)


def print_table(title: str, rows: Iterable[Sequence[str]], headings: Sequence[str] = (), caption: str = "") -> None:
    """Print a table of texts, none of which is read as markup. Without ``headings`` it is one of names and values."""
    table = Table(title=Text(title), caption=Text(caption), show_header=bool(headings))
    if headings:
        for heading in headings:
            table.add_column(heading, overflow="fold")
    else:
        table.add_column(style="bold", overflow="fold")
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


@contextlib.contextmanager
def errors_as_messages(*errors: type[Exception], where: str = "") -> Iterator[None]:
    """End the process with the message of one of these ``errors``, after ``where``, and no traceback."""
    try:
        yield
    except errors as error:
        raise SystemExit(printable(f"error: {where}{error}")) from error


@contextlib.contextmanager
def full_disk_as_message(folder: Path, resume: str) -> Iterator[None]:
    """End the process with a message and no traceback when the disk of ``folder`` is full; ``resume`` says how the run
    is continued."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _is_full_disk(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise SystemExit(f"error: the disk of {folder} is full; free some space, and continue with {resume}") from error


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # What safetensors says, and what torch.save does, whose writer tells no reason.
    return any(words in str(error) for words in ("No space left on device", "inline_container.cc"))


class TrainingBar(ProgressCallback):
    """Transformers' bar over optimizer steps with some logged values in it, instead of printed dictionaries."""

    @classmethod
    def install(cls, trainer: Trainer) -> None:
        """Replace the trainer's own progress output."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(cls)

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {}
        for name in ("loss", "eval_loss", "reward", "entropy"):
            if logs and logs.get(name) is not None:
                shown[name] = f"{logs[name]:.3g}"
        if self.training_bar is not None and shown:
            self.training_bar.set_postfix(shown)


def shutdown() -> None:
    """Wait for the other processes, end the process group, and end this process; without a group, do nothing.

    Call it last in a run that succeeded. Exit handlers are run and output is written, but the interpreter is not taken
    apart: while it is, a process can be aborted (a thread of the process group may still hold a tensor), which the
    launcher takes for a failure of the job.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ---- records, tables and figures -------------------------------------------------------------------------------------


def hardware(threads: int | None = None) -> str:
    """Describe this machine: GPU, processor, cores, and the threads that torch uses (or ``threads``)."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{cpu_name()}, {os.cpu_count()} logical cores, {threads or torch.get_num_threads()} threads"


def source_commit() -> str:
    """Return the last commit that changed the package, its kernels or recipes; empty where git cannot say."""
    words = ["git", "log", "-1", "--format=%h", "--abbrev=8", "--", "hf_mxfp4", "kernels", "recipes"]
    root = Path(hf_mxfp4.__file__).parents[1]
    try:
        return subprocess.run(words, cwd=root, capture_output=True, text=True).stdout.strip()
    except OSError:  # git is not installed
        return ""


def layers_text(facts: Mapping[str, Any]) -> str:
    """Return how many layers are quantized, of a summary or a result, as ``14 (1 left in full precision), ...``."""
    text = str(facts["n_quantized"])
    if facts["n_quantized"] and facts["n_skipped"] is not None:
        text += f" ({facts['n_skipped']} left in full precision)"
    if facts["weight_sqnr_db"] is not None:
        text += f", weight SQNR {facts['weight_sqnr_db']:.1f} dB"
    return text


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown, a line for each row."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
