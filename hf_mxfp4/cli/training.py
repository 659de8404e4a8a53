# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 plan` and `report`: the memory of a training step before a run, and the page of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import JsonOption, fail, reported_errors


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, config.json or Hub id; no weights are read.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs.")] = 1,
    gpu_memory: Annotated[float, typer.Option("--gpu-memory", min=0, help="Of each, in GB (1e9 bytes).")] = 80.0,
    mode: Annotated[
        Literal["qat", "packed", "full"],
        typer.Option("--mode", help="'qat', 'packed' (LoRA on packed weights), or 'full' precision."),
    ] = "qat",
    preset: Annotated[str | None, typer.Option("--preset", help="As in MXFP4RLConfig.")] = None,
    engine: Annotated[
        Literal["ddp", "fsdp2", "zero2", "zero3"] | None,
        typer.Option("--engine", help="How the model is spread over GPUs. [default: each]"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences per GPU and pass.")] = 8,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of a prompt and its completion.")] = 1024,
    optimizer: Annotated[Literal["adamw", "adamw_8bit", "sgd"], typer.Option("--optimizer")] = "adamw",
    checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing/--no-gradient-checkpointing", help="TRL's default is on.")
    ] = True,
    lora_rank: Annotated[int, typer.Option("--lora-rank", min=1, help="Of adapters on packed weights.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of a training step per GPU, under each engine, from the model's config.

    A tenth of each GPU is left for the CUDA context and fragmentation. Exit code 1 when nothing fits.
    """
    with reported_errors():
        from ..config import MXFP4RLConfig
        from ..lab import Setup, sizes_of
        from ..lab import plan as planned
        from ..lab.planning import ENGINES, read_config

        options = {} if preset is None else {"preset": preset}
        quantization = None if mode == "full" else MXFP4RLConfig(mode=mode, **options)
        sizes = sizes_of(read_config(model), quantization)
    usable, plans = 0.9 * gpu_memory * 1e9, {}
    for name in [engine] if engine else [name for name in ENGINES if gpus > 1 or name == "ddp"]:
        setup = Setup(quantization, name, gpus, batch, length, optimizer, checkpointing, lora_rank)
        parts, without = planned(sizes, setup), planned(sizes, replace(setup, batch=0))
        each = (parts["activations"] - without["activations"]) / batch
        largest = int((usable - sum(parts.values()) + parts["activations"]) // each)
        plans[name] = {"bytes": parts, "fits": sum(parts.values()) <= usable, "largest_batch": max(0, largest)}
    if as_json:
        typer.echo(json.dumps({"model": model, "usable_bytes_per_gpu": usable, "engines": plans}, indent=1))
    else:
        _show(f"{model}, GPUs: {gpus}, {batch} x {length} tokens each", usable, plans)
    if not any(each["fits"] for each in plans.values()):
        fail(
            f"nothing fits into {usable / 1e9:.1f} GB per GPU; use more GPUs with --engine fsdp2 or zero3, a smaller "
            "--batch, --optimizer adamw_8bit, or LoRA on packed weights (--mode packed)",
            code=1,
        )


def _show(title: str, usable: float, plans: dict[str, dict]) -> None:
    from .console import out, plain_table, say

    names = next(iter(plans.values()))["bytes"]
    rows = [[name, *(f"{each['bytes'][name] / 1e9:.2f}" for each in plans.values())] for name in names]
    rows.append(["sum", *(f"{sum(each['bytes'].values()) / 1e9:.2f}" for each in plans.values())])
    verdict = [
        [f"fits {usable / 1e9:.1f} GB", *("yes" if each["fits"] else "no" for each in plans.values())],
        ["largest batch per GPU", *(str(each["largest_batch"]) for each in plans.values())],
    ]
    out().print(plain_table(title, ["GB per GPU", *plans], rows, verdict))
    say(
        "An estimate (docs/performance.md): states are exact, activations within about a quarter. Rollouts come on top."
    )


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN_FOLDER", help="The output_dir of a training run, or one of its checkpoints."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="The HTML file. [default: run_report.html in RUN_FOLDER]")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw the plots as one picture into this file (.png, .svg) instead.")
    ] = None,
) -> None:
    """Write the report of a training run, also of one that was interrupted, from the files that it left.

    Reads run_log.jsonl, or, where there is none, trainer_state.json of the newest whole checkpoint.
    """
    if out is not None and png is not None:
        fail("--out and --png are two commands")
    with reported_errors():
        from ..lab import write_run_picture, write_run_report

        path = write_run_report(run, out) if png is None else write_run_picture(run, png)
    typer.echo(str(path))
