# SPDX-License-Identifier: Apache-2.0
"""A GRPO step on the CPU, phase by phase: quantized policies beside TRL's own trainer on the same policy.

    python -m benchmarks.grpo_step_cpu --model FOLDER       # a checkpoint, as of SmolLM2-135M-Instruct: 8 x 24 tokens
    python -m benchmarks.grpo_step_cpu --add                # the model of `make demo` with random weights: 192 x 4
    python -m benchmarks.grpo_step_cpu --rounds 1 --out -

Every contender trains by its own trainer's loop, on the same prompts, with completions of the same length and the same
dtype: TRL's `GRPOTrainer` on plain weights or LoRA adapters, `MXFP4GRPOTrainer` by its defaults on the same quantized.
In every round each trains for four steps, one contender after the other, of which the second and the third are
measured: the first warms up, and in the first and the last the monitors of our trainer measure, which they otherwise do
every 50 steps. `value` is the median of the seconds of a step by the clock, `cpu_value` that of processors, `ratio` and
`cpu_ratio` medians over the measured steps of the baseline's time over the contender's own in the same step of the same
round. `phases` are medians of both clocks by phase, `due` those of a first step, with all monitors.
"""

import argparse
import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig
from recipes.common.hardware import hardware
from recipes.tasks import arithmetic, word_problems
from recipes.tasks.tiny_model import build_char_tokenizer, build_qwen2

from .generate_cpu import records_of_others
from .macro_factors import FACTORS, FACTORS_OF
from .phases import PHASES, REST, watch
from .records import made, median_ratio, option_parser, write


NAME = "grpo_step_cpu"
COMMAND = f"python -m benchmarks.{NAME}"
BASELINE, LORA = "TRL, {dtype}", "TRL, LoRA on {dtype}"
STEPS, MEASURED = 4, slice(1, 3)
DEMO = "the demo's model with random weights"


@dataclass(frozen=True)
class Arm:
    """What is trained, and what it is compared with.

    Attributes:
        scheme: `None` for plain weights and TRL's trainer.
        adapters: whether LoRA adapters are trained instead of the weights.
        baseline: name of another arm.
    """

    scheme: MXFP4RLConfig | None
    adapters: bool
    baseline: str


#: By name, each after what it is compared with.
ARMS = {
    BASELINE: Arm(None, False, BASELINE),
    "QAT w4a4": Arm(MXFP4RLConfig(**FACTORS_OF), False, BASELINE),
    "QAT w4a16": Arm(MXFP4RLConfig(preset="w4a16", **FACTORS_OF), False, BASELINE),
    LORA: Arm(None, True, LORA),
    "LoRA on packed w4a16": Arm(MXFP4RLConfig(mode="packed", **FACTORS), True, LORA),
}


@dataclass(frozen=True)
class Workload:
    """What all contenders train on.

    Attributes:
        folder: of the checkpoint, with its tokenizer.
        prompts: texts.
        completions, tokens: of one step.
        dtype: of the weights, and of the products.
    """

    folder: Path
    prompts: list[str]
    completions: int
    tokens: int
    dtype: torch.dtype

    def trainer(self, arm: Arm, output: str) -> GRPOTrainer:
        """A trainer that generates exactly `tokens` tokens for each completion."""
        options = {} if arm.scheme is None else {"quantization_config": arm.scheme}
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        trainer, config = (GRPOTrainer, GRPOConfig) if arm.scheme is None else (MXFP4GRPOTrainer, MXFP4GRPOConfig)
        args = config(
            output_dir=output,
            max_steps=STEPS,
            per_device_train_batch_size=self.completions,
            num_generations=min(8, self.completions),
            max_completion_length=self.tokens,
            generation_kwargs={"min_new_tokens": self.tokens},
            learning_rate=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        return trainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": self.prompts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear") if arm.adapters else None,
        )


def reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ within every group, and cost nothing."""
    return [float((3 * place + sum(map(ord, text))) % 7) for place, text in enumerate(completions)]


@contextlib.contextmanager
def workload(options: argparse.Namespace) -> Iterator[tuple[Workload, str]]:
    """What to train on, and its name."""
    dtype = getattr(torch, options.dtype or ("float32" if options.model is None else "bfloat16"))
    if options.model is not None:
        prompts = word_problems.load(n_train=256, size=400).train["prompt"]
        sizes = options.completions or 8, options.tokens or 24
        yield Workload(options.model, list(prompts), *sizes, dtype), options.name or options.model.name
        return
    tokenizer = build_char_tokenizer(arithmetic.ALPHABET)
    with tempfile.TemporaryDirectory() as folder:
        build_qwen2(tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        sizes = options.completions or 192, options.tokens or 4
        yield Workload(Path(folder), list(arithmetic.load().train["prompt"]), *sizes, dtype), options.name or DEMO


class Contender:
    """A trainer that trains again and again, and the seconds of its steps."""

    def __init__(self, trainer: GRPOTrainer, tokens: int):
        trainer.remove_callback(PrinterCallback)
        self._trainer, self._tokens, self.clock = trainer, tokens, watch(trainer)

    def train(self) -> list[dict[str, tuple[float, float]]]:
        """Train once; the seconds of its steps by phase. Raises `RuntimeError` where it did not do the same work."""
        self.clock.steps.clear()
        self._trainer.train()
        logs = [entry for entry in self._trainer.state.log_history if "loss" in entry][-STEPS:]
        lengths = {entry["completions/mean_length"] for entry in logs}
        norms = [entry["grad_norm"] for entry in logs]
        if len(self.clock.steps) != STEPS or lengths != {self._tokens} or not all(0 < norm < 1e9 for norm in norms):
            raise RuntimeError(
                f"{len(self.clock.steps)} steps, completions of {lengths} tokens, norms of gradients {norms}"
            )
        return list(self.clock.steps)


def measure(found: dict[str, Contender], rounds: int) -> Iterator[dict[str, list[list[dict]]]]:
    """By contender and round, the steps of [`Contender.train`]; after each round, those so far."""
    steps: dict[str, list[list[dict]]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, contender in found.items():
            gc.collect()
            time.sleep(0.02)  # OpenMP's threads go on turning for a while
            steps[name].append(contender.train())
        yield steps


def total(step: dict[str, tuple[float, float]], clock: int) -> float:
    return sum(seconds[clock] for seconds in step.values())


def medians(steps: list[dict]) -> dict[str, list[float]]:
    """Median seconds of each phase that took any, by the clock and of processors."""
    return {
        phase: [statistics.median(step.get(phase, (0.0, 0.0))[clock] for step in steps) for clock in range(2)]
        for phase in (*PHASES, REST)
        if any(phase in step for step in steps)
    }


def records_of(steps: dict[str, list[list[dict]]], arms: dict[str, Arm]) -> list[dict]:
    """One record per contender."""
    records = []
    for name, rounds in steps.items():
        timed = {other: [step for each in steps[other] for step in each[MEASURED]] for other in steps}
        own, other = ([[total(s, clock) for s in timed[n]] for clock in range(2)] for n in (name, arms[name].baseline))
        records.append(
            {
                "name": name,
                "value": statistics.median(own[0]),
                "unit": "seconds per step",
                "baseline": arms[name].baseline,
                "ratio": median_ratio(other[0], own[0]),
                "ceiling_fraction": None,
                "cpu_value": statistics.median(own[1]),
                "cpu_ratio": median_ratio(other[1], own[1]),
                "phases": medians(timed[name]),
                "due": medians([each[0] for each in rounds]),
                "rounds": len(rounds),
            }
        )
    return records


def named(arms: dict[str, Arm], dtype: torch.dtype) -> dict[str, Arm]:
    """The arms with the dtype in their names."""
    text = str(dtype).removeprefix("torch.")
    return {
        name.format(dtype=text): Arm(arm.scheme, arm.adapters, arm.baseline.format(dtype=text))
        for name, arm in arms.items()
    }


def described(record: dict) -> str:
    phases = ", ".join(f"{phase} {cpu:.2f}" for phase, (_, cpu) in record["phases"].items())
    return (
        f"{record['name']}: {record['value']:.2f} s ({1 / record['ratio']:.2f}x of {record['baseline']}), "
        f"{record['cpu_value']:.2f} CPU s ({1 / record['cpu_ratio']:.2f}x): {phases}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = option_parser(__doc__, NAME)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, the demo's model")
    parser.add_argument("--name", help="of the model, for the records; default: the folder's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as the checkpoint is used")
    parser.add_argument("--completions", type=int, help="of a step")
    parser.add_argument("--tokens", type=int, help="of a completion")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="arms whose names have this, and their baselines")
    parser.add_argument("--add", action="store_true", help="keep the file's records of other models")
    options = parser.parse_args(arguments)
    load, before = os.getloadavg()[0], torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        with workload(options) as (work, name), tempfile.TemporaryDirectory() as output:
            kept = records_of_others(options.out, name) if options.add else []
            arms = chosen(named(ARMS, work.dtype), options.only)
            found = {arm: Contender(work.trainer(own, output), work.tokens) for arm, own in arms.items()}
            common = {
                "shape": [work.completions, work.tokens],
                "model": name,
                "threads": options.threads,
                **made(
                    COMMAND + (" --model FOLDER" if options.model else "") + f" --rounds {options.rounds}",
                    ("torch", "transformers", "trl", "peft", "hf-mxfp4"),
                    f"{hardware()}, load average {load:.1f} as it began",
                ),
            }
            for steps in measure(found, options.rounds):
                records = [{**record, **common} for record in records_of(steps, arms)]
                write([*kept, *records], options.out)  # what is measured so far, should the rest be cut off
    finally:
        torch.set_num_threads(before)
    for record in records:
        print(described(record), flush=True)


def chosen(arms: dict[str, Arm], texts: list[str] | None) -> dict[str, Arm]:
    """The arms that have one of ``texts`` in their names, and what they are compared with."""
    wanted = [arm for name, arm in arms.items() if texts is None or any(text in name for text in texts)]
    names = {arm.baseline for arm in wanted}
    return {name: arm for name, arm in arms.items() if name in names or arm in wanted}


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all")
