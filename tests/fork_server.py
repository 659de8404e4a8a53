# SPDX-License-Identifier: Apache-2.0
"""A process that has imported everything and forks one job after the other; [`processes`] is its client.

    python fork_server.py LISTENER MODULE[:FUNCTION] ...

Importing takes many times longer than most jobs. The server listens on a socket that the first client has made and
that it inherits as file descriptor LISTENER. Each connection begins with one line of JSON: ``{}`` is a client that
stays, and the server ends when the last of those has gone, however it went; anything else is a job, whose supervisor, a
fork too, answers with two lines: the process ids, then how they ended. A job whose client has gone is killed.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path


#: Seconds that a server waits for its first client.
LONELY = 60


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of sockets, which is made, for its owner alone, where it is missing."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to somebody else")
        with contextlib.suppress(FileNotFoundError), open(folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if (folder / "lock").exists():  # a server that ended may have removed it in between
                yield
                return


def serve(listener: socket.socket) -> None:
    """Answer requests until the last client that stays has gone."""
    clients: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listener, *clients], [], [], None if clients else LONELY)
        for client in [client for client in ready if client is not listener]:
            clients.remove(client)  # it only ever says that it ends
            client.close()
        if listener in ready:
            connection, _ = listener.accept()
            line = _read_line(connection)
            if line and json.loads(line):
                if os.fork() == 0:
                    _close([listener, *clients])
                    _end(_supervise, connection, json.loads(line))
                connection.close()
            elif line:
                clients.append(connection)
            else:
                connection.close()
        elif not clients and _retire(listener):
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _retire(listener: socket.socket) -> bool:
    """Remove the socket, unless a client has come meanwhile."""
    path = Path(listener.getsockname())
    with locked(path.parent):
        if select.select([listener], [], [], 0)[0]:
            return False
        path.unlink()
        path.with_suffix(".log").unlink(missing_ok=True)
        if not list(path.parent.glob("*.log")):  # the last server
            shutil.rmtree(path.parent)
    return True


def _read_line(connection: socket.socket) -> bytes:
    """The first line; nothing where the client has gone before it was whole."""
    connection.settimeout(LONELY)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:
                return b""
            line += part
    return line


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _end(function, *arguments) -> None:
    """Call a function in a fork, which ends here."""
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _supervise(connection: socket.socket, request: dict) -> None:
    """Fork the ranks of a job, say who they are, and once all have ended, how."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    pids = [_fork_rank(rank, port, request, connection) for rank in range(request["ranks"])]
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps({"pids": pids}).encode() + b"\n")
    codes: dict[int, int] = {}
    cpu, timed_out, gone = 0.0, False, False
    while len(codes) < len(pids):
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            cpu += usage.ru_utime + usage.ru_stime
            continue
        timed_out = timed_out or time.monotonic() - started > request["timeout"]
        gone = gone or bool(select.select([connection], [], [], 0.005)[0])
        if timed_out or gone:
            _kill([pid for pid in pids if pid not in codes])
            time.sleep(0.005)
    if timed_out or gone:
        _kill(pids)  # what they have left behind
    ended = {"codes": [codes[pid] for pid in pids], "timed_out": timed_out}
    ended |= {"seconds": time.monotonic() - started, "cpu": cpu}
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(ended).encode() + b"\n")


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _fork_rank(rank: int, port: int, request: dict, connection: socket.socket) -> int:
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            os.setpgid(child, child)  # here and there: whoever is first
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        connection.close()
        _become_new_process(rank, port, request)
        _run(request)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _become_new_process(rank: int, port: int, request: dict) -> None:
    """Take on what the request says, and leave what the server has."""
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    measured = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if measured:  # lines of this process count for the test that asked for it
        measured.switch_context(os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0] + "|run")
    if request["ranks"] > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"]}
        world |= {"LOCAL_WORLD_SIZE": request["ranks"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()})
    sys.path[1:1] = [path for path in request["path"] if path not in sys.path]
    faulthandler.dump_traceback_later(0.8 * request["timeout"], file=sys.stderr)
    if request["no_warnings"]:
        warnings.simplefilter("ignore")
    if "torch" in sys.modules:  # some module that is imported draws a seed
        sys.modules["torch"].manual_seed(67280421310721)  # what PyTorch begins with
    if "hf_mxfp4._logging" in sys.modules:  # its level comes from the environment
        logging.getLogger("hf_mxfp4").handlers.clear()
        sys.modules["hf_mxfp4._logging"].get_logger()


def _run(request: dict) -> None:
    kind, what = request["kind"], request["what"]
    if kind == "function":
        module, _, name = what.partition(":")
        getattr(importlib.import_module(module), name)(**request["arguments"])
        return
    sys.argv = [what if kind == "script" else "-c", *request["arguments"]]
    if kind == "script":
        sys.path[0] = str(Path(what).resolve().parent)
        runpy.run_path(what, run_name="__main__")
        return
    sys.path[0] = ""
    if kind == "module":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(what, "<code of a test>", "exec"), vars(main))


if __name__ == "__main__":
    own = socket.socket(fileno=int(sys.argv[1]))
    for argument in sys.argv[2:]:
        name, _, function = argument.partition(":")
        imported = importlib.import_module(name)
        if function:
            getattr(imported, function)()
    gc.collect()
    gc.freeze()
    serve(own)
