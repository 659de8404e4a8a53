# SPDX-License-Identifier: Apache-2.0
"""Commands of `hf-mxfp4` in this process, and checkpoints with texts to run them on."""

import json
import os
from pathlib import Path

from typer.testing import CliRunner, Result

from hf_mxfp4.cli import app
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer


ALPHABET = "0123456789+= ?\n"


def run(*arguments, **options) -> Result:
    """What a command gives."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def finish(*arguments, code: int = 0) -> Result:
    """What a command gives that is to end with an exit code."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    return result


def save_tokenizer(folder: Path, alphabet: str = ALPHABET) -> Path:
    """Save a tokenizer of characters beside a model; its folder."""
    build_char_tokenizer(alphabet).save_pretrained(folder)
    return folder


def save_texts(file: Path, rows) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def change_in_place(file: Path) -> None:
    """Flip a bit of the last number in a file of tensors, which keeps its size and the time of its last change."""
    time = file.stat().st_mtime_ns
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(time, time))


def save_with_texts(folder: Path, model, numbers) -> Path:
    """A folder of a checkpoint, ``base``, with sums in ``sums.jsonl``."""
    model.save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    save_texts(folder / "sums.jsonl", ({"text": f"{i}+{i}={2 * i}\n"} for i in numbers))
    return folder
