# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 plan`: what a run takes of each GPU's memory, and which engine makes it fit."""

import json
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import JsonOption, fail


if TYPE_CHECKING:
    from ..planning import Setup, StrategyPlan


class Mode(str, Enum):
    """`packed` plans adapters on packed weights alone."""

    QAT = "qat"
    PACKED = "packed"
    FULL = "full"


class Dtype(str, Enum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Optimizer(str, Enum):
    """The names in [`hf_mxfp4.planning.OPTIMIZERS`]."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"


class RolloutWeights(str, Enum):
    DENSE = "dense"
    PACKED = "packed"


class StepWeights(str, Enum):
    DENSE = "dense"
    PACKED = "packed"
    NONE = "none"


class Logits(str, Enum):
    CHUNKED = "chunked"
    FULL = "full"


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, config.json or Hub id; no weights are read.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="Number of GPUs.")] = 1,
    gpu_memory: Annotated[float, typer.Option("--gpu-memory", help="Of each, in GB (1e9 bytes).")] = 80.0,
    mode: Annotated[
        Mode, typer.Option("--mode", help="'qat', 'packed' (LoRA on packed weights alone), or 'full' precision.")
    ] = Mode.QAT,
    preset: Annotated[str, typer.Option("--preset", help="Of mode qat, as in MXFP4RLConfig.")] = "w4a4",
    saved_activations: Annotated[
        str, typer.Option("--saved-activations", help="full, mxfp4 or fp8, as in MXFP4RLConfig.")
    ] = "full",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences per GPU and pass.")] = 8,
    prompt: Annotated[int, typer.Option("--prompt-length", min=1, help="Tokens.")] = 512,
    completion: Annotated[int, typer.Option("--completion-length", min=1, help="Tokens.")] = 512,
    rollout_batch: Annotated[
        int | None, typer.Option("--rollout-batch", min=1, help="Sequences per GPU sampled at once. [default: --batch]")
    ] = None,
    vllm_server: Annotated[bool, typer.Option("--vllm-server", help="Another machine samples.")] = False,
    cache_rollout_weights: Annotated[
        bool,
        typer.Option("--cache-rollout-weights/--no-cache-rollout-weights", help="As in MXFP4GRPOConfig."),
    ] = True,
    rollout_weights: Annotated[
        RolloutWeights,
        typer.Option("--rollout-weights", help="As in MXFP4GRPOConfig, where 'auto' is 'packed' on GPUs with Triton."),
    ] = RolloutWeights.DENSE,
    step_weights: Annotated[
        StepWeights, typer.Option("--step-weights", help="As in MXFP4GRPOConfig; none where weights are sharded.")
    ] = StepWeights.PACKED,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of trained weights.")] = Dtype.FLOAT32,
    compute_dtype: Annotated[Dtype, typer.Option("--compute-dtype", help="Of products.")] = Dtype.BFLOAT16,
    optimizer: Annotated[Optimizer, typer.Option("--optimizer")] = Optimizer.ADAMW,
    checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing/--no-gradient-checkpointing", help="TRL's default is on.")
    ] = True,
    logits: Annotated[
        Logits, typer.Option("--logits", help="'chunked' as TRL 1.16 computes them; 'full' for transformers' loss.")
    ] = Logits.CHUNKED,
    beta: Annotated[float, typer.Option("--beta", min=0, help="Above 0 there is a reference model.")] = 0.0,
    lora_rank: Annotated[int, typer.Option("--lora-rank", min=1, help="Of adapters on packed weights.")] = 16,
    headroom: Annotated[
        float, typer.Option("--headroom", min=0, max=0.9, help="Share of memory left for the CUDA context and so on.")
    ] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Predict the memory of a training run per GPU, under each engine, from the model's config.

    Exit code 1 when nothing fits; what would is on standard error.
    """
    import torch

    from ..config import MXFP4RLConfig
    from ..planning import STRATEGIES, Planner, Setup, read_config

    try:
        quantization = None
        if mode is Mode.QAT:
            quantization = MXFP4RLConfig(preset=preset, saved_activations=saved_activations)
        setup = Setup(
            quantization,
            gpus=gpus,
            gpu_memory=gpu_memory * 1e9,
            batch=batch,
            prompt=prompt,
            completion=completion,
            rollout_batch=rollout_batch,
            dtype=getattr(torch, dtype.value),
            compute=getattr(torch, compute_dtype.value),
            optimizer=optimizer.value,
            checkpointing=checkpointing,
            logits=logits.value,
            reference=beta > 0,
            rollouts=not vllm_server,
            cache_rollout_weights=cache_rollout_weights,
            rollout_weights=rollout_weights.value,
            step_weights=step_weights.value,
            lora_rank=lora_rank,
            headroom=headroom,
        )
        planner = Planner(read_config(model), setup)
        # On one GPU there is nothing to spread.
        spread = [strategy for strategy in STRATEGIES if gpus > 1 or strategy.engine == "ddp"]
        strategies = tuple(strategy for strategy in spread if strategy.packed or mode is not Mode.PACKED)
        plans = planner.plan(setup, strategies)
    except ValueError as error:
        fail(str(error))
    advice = [] if any(each.fits for each in plans) else planner.advice(setup, strategies)
    if as_json:
        typer.echo(json.dumps(_as_json(model, setup, plans, advice), indent=1))
    else:
        _show(model, setup, plans)
    if not any(each.fits for each in plans):
        would = "; ".join(advice) or f"nothing up to 1024 GPUs of {gpu_memory:g} GB"
        fail(f"nothing fits into {setup.usable / 1e9:.1f} GB per GPU; what would: {would}", code=1)


def _as_json(model: str, setup: "Setup", plans: list["StrategyPlan"], advice: list[str]) -> dict[str, Any]:
    return {
        "model": model,
        "usable_bytes_per_gpu": setup.usable,
        "strategies": [
            {
                "name": each.strategy.name,
                "recipe": f"recipes/accelerate/{each.strategy.recipe}",
                "training_bytes": each.training,
                "rollout_bytes": each.rollouts,
                "peak_bytes": each.peak,
                "fits": each.fits,
                "largest_batch": each.largest_batch,
            }
            for each in plans
        ],
        "would_fit": advice,
    }


def _show(model: str, setup: "Setup", plans: list["StrategyPlan"]) -> None:
    from .console import out, plain_table

    def part(label: str, phase: str) -> list[list[str]]:
        """The sum of a phase under its name, and what it consists of, indented."""
        tables = [getattr(each, phase) for each in plans]
        names = list(dict.fromkeys(name for table in tables for name in table))
        lines = [[f"  {name}", *(f"{table.get(name, 0) / 1e9:.2f}" for table in tables)] for name in names]
        return [[label, *(f"{sum(table.values()) / 1e9:.2f}" for table in tables)], *lines]

    headings = ["GB per GPU", *(each.strategy.name for each in plans)]
    sections = [part("IN A TRAINING STEP", "training")]
    if setup.rollouts:
        sections.append(part("WHILE ROLLOUTS ARE SAMPLED", "rollouts"))
    sections.append(
        [
            [f"fits {setup.usable / 1e9:.1f} GB", *("yes" if each.fits else "no" for each in plans)],
            ["largest batch per GPU", *(str(each.largest_batch) for each in plans)],
        ]
    )
    if setup.gpus > 1:
        sections[-1].append(["recipes/accelerate/", *(each.strategy.recipe for each in plans)])
    title = f"{model}, GPUs: {setup.gpus}, {setup.batch} x {setup.length} tokens each"
    console = out()
    console.print(plain_table(title, headings, *sections))
    console.print(
        "Saved activations and states follow from the model's code; buffers of engines, logits and working memory are "
        "estimates (docs/performance.md).",
        markup=False,
        highlight=False,
    )
