# SPDX-License-Identifier: Apache-2.0
"""A long run of the CPU recipe, watched: does memory grow, is any logged number not finite, does noise leave a trace?

    python -m benchmarks.soak --mode qat --steps 2000        # and --mode lora

Runs `recipes/grpo.py` as it is, on smaller batches, and records in `benchmarks/results/soak_cpu.json` the slope of the
process's resident memory over the steps after a warm-up (`value`), tensors alive, and what was checked: all weights and
hooks before and after every rollout, all logged numbers, the noise that was measured beside the one intended. Exits
with 1 when a check failed.
"""

import argparse
import gc
import hashlib
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import TrainerCallback

from hf_mxfp4 import MXFP4GRPOTrainer
from recipes import grpo

from .records import RESULTS, ROOT, made, write


CONFIGS = {"qat": "tiny_cpu.yaml", "lora": "tiny_cpu_lora.yaml"}
#: A third of the recipe's batch, and checkpoints, which the recipe does not write.
SMALLER = ("--per_device_train_batch_size=64", "--n_test=200", "--greedy_batch_size=100", "--reload_check=100")
#: transformers writes the mean of the steps before in place of a loss that is not finite.
UNFILTERED = ("--logging_nan_inf_filter=false",)
CHECKPOINTS = ("--save_strategy=steps", "--save_steps=250", "--save_total_limit=2")
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
#: Share of the steps before memory is judged: caches and the allocator fill, and noise sets in after a tenth.
WARM_UP = 0.2
#: Groups of samples that the slope is fitted to. The means of long groups are nearly independent, single samples not.
GROUPS = 10
#: 97.5 % quantile of Student's t for the slope of a line through that many points.
T_975 = 2.306
#: KiB per step; the log history alone takes up to one.
LIMIT = 4.0


class Watch(TrainerCallback):
    """Samples memory every few steps.

    Attributes:
        resident: `(step, bytes)` of resident memory.
        tensors: `(step, number)` of the tensors alive.
    """

    def __init__(self, every: int):
        self.every = every
        self.resident: list[tuple[int, int]] = []
        self.tensors: list[tuple[int, int]] = []
        self._process = psutil.Process()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.resident.append((state.global_step, self._process.memory_info().rss))
        if state.global_step % (5 * self.every) == 0:
            gc.collect()
            alive = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            self.tensors.append((state.global_step, alive))


class WatchedTrainer(MXFP4GRPOTrainer):
    """Compares the model after every rollout with what it was before.

    Attributes:
        rollouts: how many were compared.
        traces: what a rollout left behind, in words.
    """

    rollouts = 0
    traces: tuple[str, ...] = ()

    def _generate(self, prompts: list):
        weights, hooks = checksum(self.model), hook_counts(self.model)
        output = super()._generate(prompts)
        self.rollouts += 1
        if checksum(self.model) != weights:
            self.traces += (f"weights changed at step {self.state.global_step}",)
        if hook_counts(self.model) != hooks:
            self.traces += (f"hooks changed at step {self.state.global_step}",)
        return output


def checksum(model: nn.Module) -> str:
    """SHA-256 of the names and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def hook_counts(model: nn.Module) -> Counter:
    """Forward hooks by module, of those that have any."""
    counts = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    return Counter({name: count for name, count in counts.items() if count})


def slope(samples: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
    """The least-squares slope of ``(x, y)`` samples in order, and its 95 % interval, from the means of ten groups.

    Raises `ValueError` for fewer samples than groups.
    """
    if len(samples) < GROUPS:
        raise ValueError(f"{len(samples)} samples are too few for {GROUPS} groups: more steps, or more samples")
    groups = torch.tensor(samples, dtype=torch.float64).tensor_split(GROUPS)
    points = torch.stack([group.mean(dim=0) for group in groups])
    x, y = (points - points.mean(dim=0)).unbind(dim=1)
    spread = x.square().sum()
    estimate = (x * y).sum() / spread
    error = ((y - estimate * x).square().sum() / (GROUPS - 2) / spread).sqrt()
    half = T_975 * error
    return float(estimate), (float(estimate - half), float(estimate + half))


def not_finite(history: Sequence[dict]) -> list[str]:
    """The logged numbers that are NaN or infinite, with their steps."""
    return [
        f"{key} at step {entry.get('step')}"
        for entry in history
        for key, value in entry.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]


def soak(mode: str, steps: int, folder: Path, every: int = 20, options: Sequence[str] = ()) -> dict:
    """Run the recipe of a mode for ``steps`` and return the record.

    Args:
        mode: `"qat"` or `"lora"`.
        folder: for the run's output, written over.
        every: steps between samples of memory.
        options: further ones of the recipe.

    Raises `RuntimeError` when nothing was compared or no noise was on.
    """
    trainers: list[WatchedTrainer] = []
    watch = Watch(every)

    def build(*args, **kwargs) -> WatchedTrainer:
        trainers.append(WatchedTrainer(*args, **kwargs))
        trainers[0].add_callback(watch)
        return trainers[0]

    config = ROOT / "recipes" / "configs" / CONFIGS[mode]
    original, grpo.MXFP4GRPOTrainer = grpo.MXFP4GRPOTrainer, build
    try:
        words = ["--config", str(config), f"--output_dir={folder}", "--overwrite=true", f"--max_steps={steps}"]
        summary = grpo.main([*words, *SMALLER, *UNFILTERED, *CHECKPOINTS, *options])
    finally:
        grpo.MXFP4GRPOTrainer = original
    (trainer,) = trainers
    noisy = [entry for entry in trainer.state.log_history if entry.get("aqn/sigma", 0) > 0]
    if not trainer.rollouts or not noisy:
        raise RuntimeError(f"{trainer.rollouts} rollouts were compared, {len(noisy)} log entries had noise")
    measured = [entry["aqn/measured_std"] / entry["aqn/sigma"] for entry in noisy]
    judged = [(step, size / 1024) for step, size in watch.resident if step > WARM_UP * steps]
    estimate, interval = slope(judged)
    weights_finite = all(bool(p.isfinite().all()) for p in trainer.model.parameters() if p.is_floating_point())
    return {
        "name": f"soak_{mode}",
        "shape": f"{summary['steps']} GRPO steps, {trainer.args.per_device_train_batch_size} completions each",
        "value": estimate,
        "unit": "KiB of resident memory per step",
        "baseline": 0.0,
        "ratio": None,
        "ceiling_fraction": None,
        "interval_95": interval,
        "judged_from_step": judged[0][0],
        "resident_mib": [[step, round(size / 2**20, 2)] for step, size in watch.resident],
        "tensors_alive": watch.tensors,
        "rollouts_compared": trainer.rollouts,
        "traces_of_noise": list(trainer.traces),
        "logged_numbers": sum(isinstance(v, float) for entry in trainer.state.log_history for v in entry.values()),
        "not_finite": not_finite(trainer.state.log_history) + ([] if weights_finite else ["weights at the end"]),
        "log_entries_with_noise": len(noisy),
        "measured_over_intended_std": [min(measured), sum(measured) / len(measured), max(measured)],
        "accuracy": [summary["accuracy_before"]["exact_match"], summary["accuracy_after"]["exact_match"]],
        "reloaded": summary["reloaded"],
        "seconds": summary["seconds"],
        "scheme": summary["scheme"],
        **made(f"python -m benchmarks.soak --mode {mode} --steps {steps}", PACKAGES),
    }


def complaints(entry: dict) -> list[str]:
    """What is wrong with a run, by its record."""
    found = [*entry["traces_of_noise"], *(f"not finite: {what}" for what in entry["not_finite"])]
    if entry["interval_95"][0] > LIMIT:
        found.append(f"resident memory grows by {entry['value']:.1f} KiB per step")
    first, last = (count for _, count in (entry["tensors_alive"][0], entry["tensors_alive"][-1]))
    if last > 1.05 * first:
        found.append(f"{first} tensors were alive early in the run, {last} at its end")
    return found


def replace_record(entry: dict, path: Path) -> None:
    """Put a record in the place of the one of the same name."""
    kept = json.loads(path.read_text()) if path.is_file() else []
    kept = [other for other in kept if other["name"] != entry["name"]]
    write(sorted([*kept, entry], key=lambda each: each["name"]), path, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=list(CONFIGS), required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20, help="steps between samples of memory")
    parser.add_argument("--output_dir", type=Path, default=None, help="default outputs/soak_<mode>")
    parser.add_argument("--record", type=Path, default=RESULTS / "soak_cpu.json")
    arguments = parser.parse_args()
    folder = arguments.output_dir or Path("outputs") / f"soak_{arguments.mode}"
    entry = soak(arguments.mode, arguments.steps, folder, arguments.every)
    replace_record(entry, arguments.record)
    low, high = entry["interval_95"]
    print(f"{entry['name']}: {entry['value']:+.2f} KiB per step, 95 % interval {low:+.2f} to {high:+.2f}")
    print(f"{entry['rollouts_compared']} rollouts compared; {entry['logged_numbers']} logged numbers")
    found = complaints(entry)
    for complaint in found:
        print(complaint)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
