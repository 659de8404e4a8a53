# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 plan`: what a training step takes of each GPU's memory."""

import json
from dataclasses import replace
from enum import Enum
from typing import Annotated

import typer

from .options import JsonOption, fail


class Mode(str, Enum):
    QAT = "qat"
    PACKED = "packed"
    FULL = "full"


class Engine(str, Enum):
    """The names in [`hf_mxfp4.lab.planning.ENGINES`]."""

    DDP = "ddp"
    FSDP2 = "fsdp2"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


class Optimizer(str, Enum):
    """The names in [`hf_mxfp4.lab.planning.OPTIMIZERS`]."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    SGD = "sgd"


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, config.json or Hub id; no weights are read.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs.")] = 1,
    gpu_memory: Annotated[float, typer.Option("--gpu-memory", min=0, help="Of each, in GB (1e9 bytes).")] = 80.0,
    mode: Annotated[
        Mode, typer.Option("--mode", help="'qat', 'packed' (LoRA on packed weights), or 'full' precision.")
    ] = Mode.QAT,
    preset: Annotated[str | None, typer.Option("--preset", help="As in MXFP4RLConfig.")] = None,
    engine: Annotated[
        Engine | None, typer.Option("--engine", help="How the model is spread over GPUs. [default: each]")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences per GPU and pass.")] = 8,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens of a prompt and its completion.")] = 1024,
    optimizer: Annotated[Optimizer, typer.Option("--optimizer")] = Optimizer.ADAMW,
    checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing/--no-gradient-checkpointing", help="TRL's default is on.")
    ] = True,
    lora_rank: Annotated[int, typer.Option("--lora-rank", min=1, help="Of adapters on packed weights.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Estimate the memory of a training step per GPU, under each engine, from the model's config.

    A tenth of each GPU is left for the CUDA context and fragmentation. Exit code 1 when nothing fits.
    """
    from ..config import MXFP4RLConfig
    from ..lab.planning import ENGINES, Setup, read_config, sizes_of
    from ..lab.planning import plan as planned

    try:
        options = {} if preset is None else {"preset": preset}
        quantization = None if mode is Mode.FULL else MXFP4RLConfig(mode=mode.value, **options)
        sizes = sizes_of(read_config(model), quantization)
    except ValueError as error:
        fail(str(error))
    chosen = [engine.value] if engine else [name for name in ENGINES if gpus > 1 or name == "ddp"]
    usable, plans = 0.9 * gpu_memory * 1e9, {}
    for name in chosen:
        setup = Setup(quantization, name, gpus, batch, length, optimizer.value, checkpointing, lora_rank)
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

    def gigabytes(count: float) -> str:
        return f"{count / 1e9:.2f}"

    names = next(iter(plans.values()))["bytes"]
    rows = [[name, *(gigabytes(each["bytes"][name]) for each in plans.values())] for name in names]
    rows.append(["sum", *(gigabytes(sum(each["bytes"].values())) for each in plans.values())])
    verdict = [
        [f"fits {usable / 1e9:.1f} GB", *("yes" if each["fits"] else "no" for each in plans.values())],
        ["largest batch per GPU", *(str(each["largest_batch"]) for each in plans.values())],
    ]
    out().print(plain_table(title, ["GB per GPU", *plans], rows, verdict))
    say(
        "An estimate (docs/performance.md): states are exact, activations within about a quarter. Rollouts come on top."
    )
