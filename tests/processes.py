# SPDX-License-Identifier: Apache-2.0
"""Processes of tests: forked by a server that has imported everything, instead of started anew.

    done = run(script(HERE / "run_grouped.py", "few"), interpret=True)
    done = run(code("print('hello')"), cwd=tmp_path)
    done = run(module("hf_mxfp4.cli", "env"), environment=os.environ | {"HF_MXFP4_VERBOSITY": "info"})
    done = run(function("engine_jobs:make_base", folder=str(tmp_path)), ranks=2)

A job has an environment, a folder, arguments and streams of its own, as if it were a new process; but modules are
imported already. What is about importing, or about settings that libraries read then (``HF_ENDPOINT``), starts a real
one. The servers, one with Triton's interpreter and one without, are started by the first who needs them, serve all
workers of a test run, and end when the last worker does.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fork_server import locked


TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PATHS = (ROOT, ROOT / "kernels", TESTS, TESTS / "distributed")
#: What the servers import; Triton looks at TRITON_INTERPRET when kernels are defined.
_COMMON = (
    "hf_mxfp4.lab", "hf_mxfp4.checkpoint", "hf_mxfp4.layers", "hf_mxfp4.integrations.transformers.quantizer",
    "hf_mxfp4.rl", "hypothesis", "mxfp4_kernels",
    "transformers.models.qwen2.modeling_qwen2", "triton.language", "torch._inductor.compile_fx",
)  # fmt: skip
_TRAINING = (
    "accelerate", "datasets", "hf_mxfp4.cli", "matplotlib.pyplot", "peft", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe", "trl.trainer.grpo_trainer",
)  # fmt: skip
MODULES = {"interpreted": ("interpret:make_faster", *_COMMON), "plain": (*_COMMON, *_TRAINING)}
#: Shared by the workers of one run, and by what they start.
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
FOLDER = Path(os.environ.setdefault("MXFP4_TEST_SERVERS", f"{tempfile.gettempdir()}/mxfp4-{_RUN}"))
#: A command that runs a script in a fork: ``[*FORKED, path, *arguments]``.
FORKED = (sys.executable, str(Path(__file__).resolve()))
#: As it was before any test: the servers' own.
ENVIRONMENT = dict(os.environ)

_stays: dict[str, socket.socket] = {}
_started: list[subprocess.Popen] = []


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
    """How a job has ended: return codes of its ranks (negative: a signal), what they wrote, and seconds."""

    codes: list[int]
    stdout: str
    stderr: str
    timed_out: bool
    seconds: float
    cpu: float

    @property
    def returncode(self) -> int:
        return next((code for code in self.codes if code), 0)

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Process:
    """A job that runs; made by [`start`]. It is killed when nothing refers to it any more."""

    def __init__(self, connection: socket.socket, files: list[Path], folder: tempfile.TemporaryDirectory):
        self._connection, self._files, self._folder = connection, files, folder
        self._lines = connection.makefile("r", encoding="utf-8")
        self._done: Done | None = None
        self.pids: list[int] = self._answer()["pids"]

    def _answer(self) -> dict:
        line = self._lines.readline()
        if not line:
            raise RuntimeError(f"the fork server ended; its output: {_logs()}")
        return json.loads(line)

    def wait(self) -> Done:
        if self._done is None:
            answer = self._answer()
            texts = [path.read_text(errors="replace") for path in dict.fromkeys(self._files)]
            self._done = Done(stdout=texts[0], stderr="".join(texts[1:]), **answer)
            self._lines.close()
            self._connection.close()
            self._folder.cleanup()
        return self._done

    def poll(self) -> int | None:
        """The return code; None while it runs."""
        if self._done is None and not select.select([self._connection], [], [], 0)[0]:
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
        timeout: seconds after which the job, and what it has started, is killed.
        log: a file for both streams of all ranks, to which they are appended; ``stdout`` then has them.
        no_warnings: as with ``-W ignore``.
    """
    environment = dict(os.environ if environment is None else environment)
    environment["TRITON_INTERPRET"] = str(int(interpret))
    name = "interpreted" if interpret else "plain"
    if name not in _stays:
        _stays[name] = _first_connection(name)
    folder = tempfile.TemporaryDirectory(prefix="job-", dir=FOLDER)
    files = [log, log] if log else [Path(folder.name) / name for name in ("stdout", "stderr")]
    for file in files:
        file.touch()
    request = job._asdict() | {
        "ranks": ranks, "environment": environment, "cwd": str(cwd or os.getcwd()), "timeout": timeout,
        "path": [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path],
        "stdout": str(files[0]), "stderr": str(files[1]), "no_warnings": no_warnings,
    }  # fmt: skip
    return Process(_connect(name, request), files, folder)


def run(job: Job, **options: Any) -> Done:
    """Run a job to its end; options as of [`start`]."""
    return start(job, **options).wait()


def _first_connection(name: str) -> socket.socket:
    """A connection that lasts as long as this process, to a server that is started if there is none."""
    with locked(FOLDER):
        if not (FOLDER / name).exists():
            _start_server(name)
        return _connect(name, {})


def _connect(name: str, request: dict) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(FOLDER / name))
        connection.sendall(json.dumps(request).encode() + b"\n")
    except OSError as error:
        raise RuntimeError(f"the {name} fork server ended; its output: {_logs()}") from error
    return connection


def _start_server(name: str) -> None:
    environment = ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CI": "1",
        "TRITON_INTERPRET": str(int(name == "interpreted")),
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as listener, open(FOLDER / f"{name}.log", "w") as log:
        listener.bind(str(FOLDER / name))
        listener.listen(64)
        command = [sys.executable, str(TESTS / "fork_server.py"), str(listener.fileno()), *MODULES[name]]
        descriptors = {"pass_fds": [listener.fileno()], "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        _started.append(subprocess.Popen(command, env=environment, start_new_session=True, **descriptors))


def _logs() -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in FOLDER.glob("*.log"))


@atexit.register
def leave_servers() -> None:
    """Tell the servers that this process ends, and see those end that serve nobody else."""
    for connection in _stays.values():
        connection.close()
    if "PYTEST_XDIST_TESTRUNUID" not in os.environ:
        for process in _started:
            process.wait(30)


if __name__ == "__main__":
    done = run(script(*sys.argv[1:]), timeout=600)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)
