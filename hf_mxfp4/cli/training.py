# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 plan`, `report` and `run`: memory of a training step, the page of a run, running other programs."""

import importlib
import os
import re
import runpy
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import hf_mxfp4

from .. import checkpoint, lab
from .common import JsonOption, SkipOption, fail, print_json, print_table, say


#: How the processes of a launcher are started.
_MODULE = "hf_mxfp4.cli"
_COMMAND = ("run", "--")
#: Modules of launchers, and the function of each that starts processes.
_LAUNCHERS = {"accelerate.commands.launch": "launch_command", "torch.distributed.run": "run"}


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, config.json or Hub id; no weights are read.")],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    gpu_memory: Annotated[float, typer.Option(min=0, help="Of each, in GB (1e9 bytes).")] = 80.0,
    mode: Annotated[
        Literal["qat", "packed", "full"] | None,
        typer.Option(
            help="'qat', 'packed' (LoRA on packed weights), or 'full' precision. [default: as MODEL was saved, or qat]"
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="As in MXFP4RLConfig.")] = None,
    skip: SkipOption = None,
    engine: Annotated[
        Literal["ddp", "fsdp2", "zero2", "zero3"] | None,
        typer.Option(help="How the model is spread over GPUs. [default: each]"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per GPU and pass.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt and its completion.")] = 1024,
    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw",
    gradient_checkpointing: Annotated[bool, typer.Option(help="TRL's default is on.")] = True,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Of adapters on packed weights.", show_default="16")
    ] = None,
    lora_experts: Annotated[bool, typer.Option(help="Adapters on experts too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of a training step per GPU, under each engine, from the model's config.

    A tenth of each GPU is left for the CUDA context and fragmentation. Exit code 1 when nothing fits.
    """
    config = lab.planning.read_config(model)
    own = checkpoint.stored_scheme(getattr(config, "quantization_config", None))
    if mode == "full" and (preset or skip):
        fail("--preset and --skip have no effect with --mode full; leave them out")
    quantization = None if mode == "full" else _quantization(own, mode, preset, skip or [])
    has_adapters = quantization is not None and quantization.mode == "packed"
    if not has_adapters and (lora_rank is not None or lora_experts):
        fail("--lora-rank and --lora-experts are of adapters on packed weights; add --mode packed, or leave them out")
    sizes = lab.sizes_of(config, quantization, lora_experts)
    usable = 0.9 * gpu_memory * 1e9
    engines = lab.planning.ENGINES if gpus > 1 else ("ddp",)
    if engine is not None:
        engines = (engine,)
    plans: dict[str, Any] = {}
    for name in engines:
        setup = lab.Setup(quantization, name, gpus, batch, length, optimizer, gradient_checkpointing, lora_rank or 16)
        plans[name] = lab.planning.fit(sizes, setup, usable)
    if as_json:
        print_json({"model": model, "usable_bytes_per_gpu": usable, "engines": plans})
    else:
        _show_plans(f"{model}, GPUs: {gpus}, {batch} x {length} tokens each", plans, usable)
    if not any(plan["fits"] for plan in plans.values()):
        fail(
            f"nothing fits into {usable / 1e9:.1f} GB per GPU; use more GPUs with --engine fsdp2 or zero3, a smaller "
            "--batch, --optimizer adamw_8bit, or LoRA on packed weights (--mode packed)",
            code=1,
        )


def _show_plans(title: str, plans: dict[str, Any], usable: float) -> None:
    """Print the parts of each engine's plan, and whether they fit into ``usable`` bytes."""
    sums = {name: {**plan["bytes"], "sum": sum(plan["bytes"].values())} for name, plan in plans.items()}
    rows = []
    for part in next(iter(sums.values())):
        rows.append([part, *(f"{parts[part] / 1e9:.2f}" for parts in sums.values())])
    verdict = [
        [f"fits {usable / 1e9:.1f} GB", *("yes" if plan["fits"] else "no" for plan in plans.values())],
        ["largest batch per GPU", *(str(plan["largest_batch"]) for plan in plans.values())],
    ]
    print_table(title, ["GB per GPU", *plans], rows, verdict)
    say(
        "An estimate (docs/performance.md): states are exact, activations within about a quarter. Rollouts come on top."
    )


def _quantization(own: Any, mode: str | None, preset: str | None, skip: list[str]) -> "hf_mxfp4.MXFP4RLConfig":
    """Return the scheme that the checkpoint was saved with, if there is one and the options allow it."""
    if own is not None and preset is None and mode in (None, own.mode):
        config = own
    else:
        mode = mode or (own.mode if own else "qat")
        config = hf_mxfp4.MXFP4RLConfig(mode=mode, preset=preset or hf_mxfp4.MXFP4RLConfig.preset)
    return replace(config, modules_to_not_convert=[*(config.modules_to_not_convert or ()), *skip] or None)


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN_FOLDER", help="The output_dir of a training run, or one of its checkpoints."),
    ],
    png: Annotated[Path | None, typer.Option(help="Draw the plots as one picture (.png, .svg) instead.")] = None,
) -> None:
    """Write run_report.html into the folder of a training run, also of one that was interrupted.

    Reads run_log.jsonl, or, where there is none, trainer_state.json of the newest whole checkpoint.
    """
    path = lab.write_run_report(run) if png is None else lab.write_run_picture(run, png)
    say(str(path))


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
    if re.fullmatch(r"python[\d.]*", Path(command[0]).name) and len(command) > 1:
        command = command[1:]
    name, *arguments = command
    if name == "deepspeed":
        fail(f"deepspeed starts its own processes; run deepspeed --module {_MODULE} {' '.join(_COMMAND)} SCRIPT ...")
    for launcher, function in _LAUNCHERS.items():
        module = importlib.import_module(launcher)
        setattr(module, function, _wrapped(getattr(module, function)))
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
        kind = "no such command"
        if name.startswith("-"):
            kind = "an option of python; -m MODULE is the only one here"
        fail(f"{name!r} is {kind}. Give a console script that is installed here, a Python file, or -m and a module")


def _wrapped(launch: Any) -> Any:
    """Make accelerate (which `trl` uses) or torchrun start its processes through this command."""

    def launch_through_run(args: Any) -> Any:
        if args.training_script != _MODULE:
            script = ["-m", args.training_script] if args.module else [args.training_script]
            args.training_script_args = [*_COMMAND, *script, *args.training_script_args]
            args.training_script = _MODULE
            args.module = True
            args.no_python = False
        return launch(args)

    return launch_through_run
