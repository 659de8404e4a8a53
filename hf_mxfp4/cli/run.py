# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 run`: another command with this package imported."""

import importlib
import os
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .options import fail


#: How the processes of a launcher are started.
_MODULE, _COMMAND = f"{__package__}", ("run", "--")
#: Modules of launchers, and the function of each that starts processes.
_LAUNCHERS = {"accelerate.commands.launch": "launch_command", "torch.distributed.run": "run"}


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...", help="A console script, a Python file, or -m and a module, with its arguments."
        ),
    ],
) -> None:
    """Run another command with hf_mxfp4 imported, so that it loads, trains and saves our checkpoints in MXFP4.

    hf-mxfp4 run -- trl sft --model_name_or_path DIR ...

    The command runs in this process. Processes that accelerate, trl and torchrun start import hf_mxfp4 too.
    """
    if Path(command[0]).name.startswith("python") and len(command) > 1:
        command = command[1:]
    name, *arguments = command
    if name == "deepspeed":
        fail(f"deepspeed starts its own processes; run deepspeed --module {_MODULE} {' '.join(_COMMAND)} SCRIPT ...")
    _wrap_launchers()
    if name == "-m":
        if not arguments:
            fail("-m needs the name of a module")
        sys.argv = arguments
        sys.path[0] = os.getcwd()
        if arguments[0] in _LAUNCHERS:
            sys.exit(sys.modules[arguments[0]].main())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif found := tuple(entry_points(group="console_scripts", name=name)):
        sys.argv = command
        sys.exit(found[0].load()())
    elif Path(name).is_file():
        sys.argv = command
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")
    else:
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    kind = "an option of python; -m MODULE is the only one here" if name.startswith("-") else "no such command"
    fail(f"{name!r} is {kind}. Give a console script that is installed here, a Python file, or -m and a module")


def _wrap_launchers() -> None:
    """Make accelerate (which `trl` uses) and torchrun start their processes through this command."""
    for name, function in _LAUNCHERS.items():
        module = importlib.import_module(name)
        setattr(module, function, _wrapped(getattr(module, function)))


def _wrapped(launch: Any) -> Any:
    def launch_through_run(args: Any) -> Any:
        if args.training_script != _MODULE:
            script = ["-m", args.training_script] if args.module else [args.training_script]
            args.training_script_args = [*_COMMAND, *script, *args.training_script_args]
            args.training_script, args.module, args.no_python = _MODULE, True, False
        return launch(args)

    return launch_through_run
