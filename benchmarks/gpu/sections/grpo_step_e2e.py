# SPDX-License-Identifier: Apache-2.0
"""Seconds of a GRPO step of TRL on a model of the size of Qwen2.5-1.5B: rollout, scoring, training, update."""

import contextlib
import io
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from hf_mxfp4 import MXFP4RLConfig

from .. import models
from ..bench import SHORTEST_CASE, Bench, Measured
from ..checks import WrongResult
from ..peers import need


NAME, SHARE = "grpo_step_e2e", 110

BASELINE, NF4 = "TRL BF16", "QLoRA NF4"
#: Our arms: the scheme, and whether adapters are trained instead of the weights.
OURS: dict[str, tuple[MXFP4RLConfig, bool]] = {
    "packed w4a16 + LoRA": (MXFP4RLConfig(mode="packed"), True),
    "QAT w4a4g4": (MXFP4RLConfig(preset="w4a4g4", outlier_fallback=None), False),
}
#: Seconds to build a model and a trainer and to make two steps.
_NEEDS = 15.0
#: What each of ours is compared with first.
BASELINES = {"packed w4a16 + LoRA": NF4, "QAT w4a4g4": BASELINE}


def run(bench: Bench) -> None:
    # Completions of a step, tokens of each, steps timed after one that is not.
    sizes = (4, 3, 1) if bench.machine.tiny else (32, 64, 2)
    seconds: dict[str, list[float]] = {}
    arms: dict[str, Callable[[], Any]] = {
        BASELINE: lambda: _trainer(bench, sizes, None, False),
        NF4: lambda: _trainer(bench, sizes, "nf4", True),
        **{name: lambda arm=arm: _trainer(bench, sizes, *arm) for name, arm in OURS.items()},
    }
    for name, build in arms.items():

        def measured(name: str = name, build: Callable = build) -> Measured:
            need("trl")
            seconds[name] = _steps(bench, build, sizes)
            value = statistics.median(seconds[name])
            peers = {
                other: {"ratio": statistics.median(seconds[other]) / value, "status": "ok"}
                for other in (BASELINE, NF4)
                if other in seconds and name in OURS
            }
            baseline = BASELINES.get(name)
            ratio = peers.get(baseline, {}).get("ratio")
            details = {"seconds": value, "steps": seconds[name], "peers": peers}
            return Measured(value, "s per step", baseline, ratio, details=details)

        bench.case(name, list(sizes[:2]), measured, needs=SHORTEST_CASE if bench.machine.tiny else _NEEDS)


class _Clock(TrainerCallback):
    """When steps begin and end. Stops when another one would not fit into the section's time."""

    def __init__(self, bench: Bench):
        self.bench, self.machine, self.seconds, self._begun = bench, bench.machine, [], 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.machine.synchronize()
        # The rollout of a step comes after this event, in the trainer's own `training_step`.
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.machine.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)
        if len(self.seconds) > 1 and self.bench.seconds_left < 1.2 * self.seconds[-1]:
            control.should_training_stop = True


def _steps(bench: Bench, build: Callable[[], Any], sizes: tuple[int, int, int]) -> list[float]:
    """Seconds of each timed step. Raises `WrongResult` when a step did something else than all others."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = build()(folder)
        clock = _Clock(bench)
        trainer.add_callback(clock)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    if len(clock.seconds) < 2 or len(logs) != len(clock.seconds):
        raise WrongResult(f"{len(clock.seconds)} steps and {len(logs)} logs")
    for entry in logs:
        if entry["completions/mean_length"] != sizes[1]:
            raise WrongResult(f"completions of {entry['completions/mean_length']} tokens, not {sizes[1]}")
        if not (math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) and entry["grad_norm"] > 0):
            raise WrongResult(f"loss {entry['loss']}, norm of gradients {entry['grad_norm']}")
    return clock.seconds[1:]


def _trainer(
    bench: Bench, sizes: tuple[int, int, int], scheme: MXFP4RLConfig | str | None, adapters: bool
) -> Callable[[str], Any]:
    """What makes the trainer of an arm in a folder. Full weights are float32 under bfloat16 autocast, as training them
    needs; frozen ones are as small as they go."""
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer

    machine = bench.machine
    count, length, steps = sizes

    def make(folder: str):
        model = models.build(machine, torch.bfloat16 if adapters else torch.float32)
        if scheme == "nf4":
            model = models.nf4(model, machine)
        elif scheme is not None:
            model = models.quantized(model, scheme, machine)
        ours = isinstance(scheme, MXFP4RLConfig)
        options = {
            "output_dir": folder,
            "per_device_train_batch_size": count,
            "num_generations": 2 if machine.tiny else 8,
            "max_completion_length": length,
            "generation_kwargs": {"min_new_tokens": length},
            "max_steps": steps + 1,
            "learning_rate": 1e-6,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "bf16": not machine.interpreted,
            "use_cpu": machine.interpreted,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "beta": 0.0,
        }
        if ours:
            options |= {"aqn": False, "error_every": 0}
        lora = LoraConfig(task_type="CAUSAL_LM", r=models.LORA_RANK, target_modules="all-linear") if adapters else None
        return (MXFP4GRPOTrainer if ours else GRPOTrainer)(
            model,
            reward,
            (MXFP4GRPOConfig if ours else GRPOConfig)(**options),
            models.prompts(4 * count),
            processing_class=models.tokenizer(),
            peft_config=lora,
        )

    return make


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that differs between completions of random tokens, so that there is a gradient."""
    return [sum(ids) / (1000 * len(ids)) for ids in completion_ids]
