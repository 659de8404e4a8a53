# SPDX-License-Identifier: Apache-2.0
"""Processes of tests, forked from a server that has imported everything: importing takes longer than most jobs.

    done = run(script(HERE / "run_grouped.py", "few"), interpret=True)
    done = run(code("print('hello')"), cwd=tmp_path)
    done = run(module("hf_mxfp4.cli", "env"), environment=os.environ | {"HF_MXFP4_VERBOSITY": "info"})
    done = run(function("engine_jobs:make_base", folder=str(tmp_path)), ranks=2)

A job has an environment, a folder, arguments and streams of its own, as if it were a new process; but modules are
imported already. Tests of importing, or of settings that libraries read while they are imported (``HF_ENDPOINT``),
start a new process instead. So do jobs whose Triton kernels are interpreted: Triton looks at TRITON_INTERPRET when
kernels are defined.
"""

import atexit
import contextlib
import faulthandler
import importlib
import json
import logging
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PATHS = (ROOT, ROOT / "kernels", TESTS, TESTS / "distributed")
#: What the server imports.
MODULES = [
    "processes", "accelerate", "datasets", "hf_mxfp4.checkpoint", "hf_mxfp4.cli",
    "hf_mxfp4.integrations.transformers.quantizer", "hf_mxfp4.lab", "hf_mxfp4.layers", "hf_mxfp4.rl", "hypothesis",
    "matplotlib.pyplot", "mxfp4_kernels", "peft", "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "triton.language", "trl.trainer.grpo_trainer",
]  # fmt: skip
#: The environment of the server, as it was before any test.
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
    "CI": "1",
}  # fmt: skip

_forks = multiprocessing.get_context("forkserver")


class Job(NamedTuple):
    """What a process runs."""

    kind: str
    what: str
    arguments: Any


def script(path: str | Path, *arguments: str) -> Job:
    """``python PATH ARGUMENT ...``"""
    return Job("script", str(path), [str(argument) for argument in arguments])


def module(name: str, *arguments: str) -> Job:
    """``python -m NAME ARGUMENT ...``"""
    return Job("module", name, [str(argument) for argument in arguments])


def code(text: str, *arguments: str) -> Job:
    """``python -c TEXT ARGUMENT ...``"""
    return Job("code", text, [str(argument) for argument in arguments])


def function(name: str, **arguments: Any) -> Job:
    """A call of ``"module:function"`` with arguments that JSON has."""
    return Job("function", name, arguments)


class Done(NamedTuple):
    """How a job has ended: return codes of its ranks (negative: a signal), and what they wrote."""

    codes: list[int]
    stdout: str
    stderr: str
    timed_out: bool

    @property
    def returncode(self) -> int:
        return next((code for code in self.codes if code), 0)

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Process:
    """A job that runs; made by [`start`]."""

    def __init__(self, ranks: list[Any], files: list[Path], folder: tempfile.TemporaryDirectory, timeout: float):
        self._ranks = ranks
        self._files = files
        self._folder = folder
        self._end = time.monotonic() + timeout
        self._done: Done | None = None
        self.pids: list[int] = [rank.pid for rank in ranks]

    def wait(self) -> Done:
        if self._done is None:
            for rank in self._ranks:
                rank.join(max(0.0, self._end - time.monotonic()))
            timed_out = any(rank.is_alive() for rank in self._ranks)
            if timed_out:
                self._kill()
            texts = [path.read_text(errors="replace") for path in dict.fromkeys(self._files)]
            codes = [rank.exitcode for rank in self._ranks]
            self._done = Done(codes, texts[0], "".join(texts[1:]), timed_out)
            self._folder.cleanup()
        return self._done

    def _kill(self) -> None:
        """Kill the ranks with everything that they started."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.kill()  # it may not have made its group yet
            rank.join()

    def poll(self) -> int | None:
        """The return code; None while it runs."""
        if any(rank.is_alive() for rank in self._ranks):
            return None
        return self.wait().returncode

    def send_signal(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, by default SIGKILL, to every rank."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def start(
    job: Job,
    *,
    ranks: int = 1,
    interpret: bool = False,
    environment: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 300,
    log: Path | None = None,
    no_warnings: bool = False,
) -> Process:
    """Start a job.

    Args:
        ranks: how many processes; more than one have the variables that launchers set, ``RANK`` and the like.
        interpret: Triton's kernels are interpreted.
        environment: all variables; those of this process by default.
        timeout: seconds after which [`Process.wait`] kills the job, and what it has started.
        log: a file for both streams of all ranks, to which they are appended; ``stdout`` then has them.
        no_warnings: as with ``-W ignore``.
    """
    with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
        _forks.set_forkserver_preload(MODULES)
        multiprocessing.forkserver.ensure_running()
    folder = tempfile.TemporaryDirectory(prefix="job-")
    files = [log, log] if log else [Path(folder.name) / name for name in ("stdout", "stderr")]
    for file in files:
        file.touch()
    environment = dict(os.environ if environment is None else environment)
    environment["TRITON_INTERPRET"] = str(int(interpret))
    request = job._asdict() | {
        "interpret": interpret, "environment": environment, "cwd": str(cwd or os.getcwd()), "timeout": timeout,
        "stdout": str(files[0]), "stderr": str(files[1]), "no_warnings": no_warnings,
    }  # fmt: skip
    processes = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(ranks):
        if ranks > 1:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            request["environment"] = environment | {name: str(value) for name, value in world.items()}
        process = _forks.Process(target=_run_fork, args=(dict(request),), daemon=True)
        process.start()
        processes.append(process)
    return Process(processes, files, folder, timeout)


def run(job: Job, **options: Any) -> Done:
    """Run a job to its end; options as of [`start`]."""
    return start(job, **options).wait()


# ---- in the fork --------------------------------------------------------------------------------------------------


def _run_fork(request: dict) -> None:
    """Run a job in a fork of the server, as if it were a new process."""
    os.setpgid(0, 0)
    threading.Thread(target=_die_with_the_test, daemon=True).start()
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["interpret"]:
        os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
        sys.exit(subprocess.call([sys.executable, __file__, json.dumps(request)]))
    if "coverage" in sys.modules:
        measured = sys.modules["coverage"].Coverage.current()
        if measured:  # lines of this process count for the test that asked for it
            measured.switch_context(os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0] + "|run")
    sys.modules["torch"].manual_seed(67280421310721)  # what PyTorch begins with; an imported module draws a seed
    logging.getLogger("hf_mxfp4").handlers.clear()
    sys.modules["hf_mxfp4._logging"].get_logger()  # its level comes from the environment
    try:
        _run(request)
    finally:
        atexit._run_exitfuncs()


def _die_with_the_test() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _run(request: dict) -> None:
    paths = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    faulthandler.dump_traceback_later(0.8 * request["timeout"], file=sys.stderr)
    if request["no_warnings"]:
        warnings.simplefilter("ignore")
    what = request["what"]
    if request["kind"] == "function":
        name, _, attribute = what.partition(":")
        getattr(importlib.import_module(name), attribute)(**request["arguments"])
        return
    sys.argv = [what if request["kind"] == "script" else "-c", *request["arguments"]]
    if request["kind"] == "script":
        sys.path[0] = str(Path(what).resolve().parent)
        runpy.run_path(what, run_name="__main__")
        return
    sys.path[0] = ""
    if request["kind"] == "module":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(what, "<code of a test>", "exec"), vars(main))


if __name__ == "__main__":
    from interpret import make_faster

    make_faster()
    _run(json.loads(sys.argv[1]))
