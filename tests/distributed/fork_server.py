# SPDX-License-Identifier: Apache-2.0
"""A process that has imported everything and forks the ranks of one small distributed job after the other.

Importing takes many times longer than the jobs of these tests. [`ForkServer`] is the client.
"""

import contextlib
import faulthandler
import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = (ROOT, ROOT / "kernels", ROOT / "tests", ROOT / "recipes", HERE)


class ForkServer:
    """Runs functions of test modules in freshly forked processes; a context manager.

    Args:
        modules: what the server imports before it forks.
    """

    def __init__(self, *modules: str):
        path = os.pathsep.join(map(str, PATHS))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CI": "1"}
        environment["HF_MXFP4_VERBOSITY"] = "info"
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def run(
        self,
        function: str,
        log: Path,
        *,
        ranks: int = 1,
        timeout: float = 100,
        kill_after: float | None = None,
        kill_once: Path | None = None,
        **arguments,
    ) -> dict:
        """Run ``"module:function"`` with JSON ``arguments`` in each rank.

        Args:
            log: file for the output of all ranks.
            timeout: seconds after which all ranks are killed.
            kill_after: seconds after which all ranks get SIGKILL.
            kill_once: count those seconds from when this path exists.

        Returns:
            ``codes`` of the ranks (negative: a signal), ``timed_out``, ``seconds``, and the ``output``.
        """
        request = {"function": function, "log": str(log), "ranks": ranks, "timeout": timeout, "arguments": arguments}
        request |= {"kill_after": kill_after, "kill_once": kill_once and str(kill_once)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended with {self.process.wait(10)}")
        return {**json.loads(answer), "output": log.read_text(errors="replace")}

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *exception) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


def serve(modules: list[str]) -> None:
    """Answer requests on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        answers.write(json.dumps(_run_job(json.loads(line))) + "\n")
        answers.flush()


def _run_job(request: dict) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    children = {_fork_rank(rank, port, request): rank for rank in range(request["ranks"])}
    codes: dict[int, int] = {}
    deadline, kill_at = started + request["timeout"], math.inf
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            continue
        armed = request["kill_after"] is not None and kill_at == math.inf
        if armed and (request["kill_once"] is None or os.path.exists(request["kill_once"])):
            kill_at = time.monotonic() + request["kill_after"]
        if time.monotonic() > min(deadline, kill_at):
            for child in children:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    timed_out = time.monotonic() > deadline
    ordered = [codes[rank] for rank in range(request["ranks"])]
    return {"codes": ordered, "timed_out": timed_out, "seconds": time.monotonic() - started}


def _fork_rank(rank: int, port: int, request: dict) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        if request["ranks"] > 1:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"]}
            world |= {"LOCAL_WORLD_SIZE": request["ranks"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in world.items()})
        faulthandler.dump_traceback_later(0.8 * request["timeout"], file=sys.stderr)
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(**request["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
