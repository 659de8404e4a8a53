# SPDX-License-Identifier: Apache-2.0
"""Runs of `grpo.py` that are forked from a process which has imported everything: of tiny runs, that is most of the
time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch

from recipes.ablations.runner import GRPO


_ROOT = str(Path(__file__).resolve().parents[3])


class _Fork:
    """A process of `multiprocessing` with what `subprocess.Popen` has."""

    def __init__(self, process: multiprocessing.process.BaseProcess):
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()


def start_fork(command: list[str], log: TextIO, environment: Mapping[str, str], lock: int) -> _Fork:
    """Start what a command says after the name of `grpo.py`, as `recipes.ablations.runner.start_process` does; the lock
    stays with us."""
    context = multiprocessing.get_context("forkserver")
    # Not every Python hands its search path to the server; where modules are not found there, each fork imports them.
    paths = [_ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    context.set_forkserver_preload(["recipes.grpo", "matplotlib.backends.backend_agg"])
    words = command[command.index(str(GRPO)) + 1 :]
    process = context.Process(target=_run, args=(words, log.name, dict(environment)))
    process.start()
    return _Fork(process)


def _run(words: list[str], log: str, environment: dict[str, str]) -> None:
    with open(log, "a") as file, open(os.devnull) as nothing:
        for number, stream in ((0, nothing), (1, file), (2, file)):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [str(GRPO), *words]
    from recipes import grpo

    grpo.main(words)
