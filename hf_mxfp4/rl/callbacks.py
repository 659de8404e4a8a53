# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a run: policy entropy, the step of layers that draw random numbers, short logs on the console, and the
log `run_log.jsonl`."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from .._logging import get_logger
from ..layers import set_quantization_step
from ..report import uncounted_weights
from ..utils import Mixin, machine, package_versions
from .run_log import RUN_LOG, RunLog


#: An alarm is raised below this entropy, in nats per token, and above this multiple of the entropy at the start.
_COLLAPSE, _EXPLOSION = 0.05, 2.0
#: Logged values that the entropy at the start is averaged over, and that its slope is fitted to.
_START_VALUES, _SLOPE_VALUES = 3, 20
_CODES = {"": 0, "collapse": -1, "explosion": 1}
_ADVICE = {
    "collapse": "the policy stopped exploring; raise aqn_sigma_start or entropy_coef, or lower the rate",
    "explosion": "the policy is losing its shape; lower aqn_sigma_start or the learning rate",
}


def add_to_log(state: TrainerState, logs: dict, values: dict[str, float]) -> None:
    """Add values to the line that is being logged, for the history and for the callbacks that come after."""
    if state.log_history:
        state.log_history[-1].update(values)
    logs.update(values)


class EntropyCallback(TrainerCallback):
    """Follows the policy entropy that the trainer logs, and raises an alarm when it collapses or explodes.

    Adds `entropy/slope` (nats per step, least squares over the last 20 logged values) and `entropy/alarm` (-1 collapse,
    1 explosion, 0 neither) to the log history.

    Attributes:
        history: `(step, entropy)` pairs.
        alarms: `(step, "collapse" or "explosion", entropy)`, one entry for each time an alarm begins.
    """

    def __init__(self):
        self.history: list[tuple[int, float]] = []
        self.alarms: list[tuple[int, str, float]] = []
        self._state = ""

    def on_train_begin(self, args, state, control, **kwargs):
        self.history = [(log["step"], log["entropy"]) for log in state.log_history if log.get("entropy") is not None]

    def on_log(self, args, state, control, logs=None, **kwargs):
        entropy = (logs or {}).get("entropy")
        if entropy is None:
            return
        self.history.append((state.global_step, float(entropy)))
        alarm = self._alarm(float(entropy))
        if alarm and alarm != self._state:
            self.alarms.append((state.global_step, alarm, float(entropy)))
            get_logger().warning("step %d: entropy %s (%.4f): %s", state.global_step, alarm, entropy, _ADVICE[alarm])
        self._state = alarm
        add_to_log(state, logs, {"entropy/slope": self.slope(), "entropy/alarm": _CODES[alarm]})

    def slope(self) -> float:
        """Return nats per step over the last 20 logged values; 0 for fewer than two."""
        recent = torch.tensor(self.history[-_SLOPE_VALUES:], dtype=torch.float64)
        if len(recent) < 2:
            return 0.0
        step, entropy = (recent - recent.mean(dim=0)).unbind(dim=1)
        spread = step.square().sum()
        return float((step * entropy).sum() / spread) if spread > 0 else 0.0

    def _alarm(self, entropy: float) -> str:
        if entropy < _COLLAPSE:
            return "collapse"
        start = [value for _, value in self.history[:_START_VALUES]]
        has_exploded = len(self.history) > _START_VALUES and entropy > _EXPLOSION * sum(start) / len(start)
        return "explosion" if has_exploded else ""


class QuantizationStepCallback(TrainerCallback):
    """Tells the layers that draw random numbers which step they are in, so that a resumed run repeats them.

    Raises `ValueError` at the first step of a model without such a layer.
    """

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        set_quantization_step(model, state.global_step)


# ---- the console ---------------------------------------------------------------------------------------------------

_SHOWN = ("loss", "reward", "completions/mean_length", "sampling/kl", "entropy")
#: What the console shows of the log of a step, of an evaluation, and of the end of training.
_SHOWN_OF_A_LOG = (*_SHOWN, *(f"eval_{name}" for name in _SHOWN), "train_runtime", "train_loss")


class _ShortLogs(Mixin):
    """Prints the few values of a log that say how training goes, where transformers prints all of them."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {"step": state.global_step}
        for name in _SHOWN_OF_A_LOG:
            if logs and logs.get(name) is not None:
                shown[name] = logs[name]
        super().on_log(args, state, control, logs=shown, **kwargs)


class ShortPrinterCallback(_ShortLogs, PrinterCallback):
    """[`transformers.PrinterCallback`] with short lines."""


class ShortProgressCallback(_ShortLogs, ProgressCallback):
    """[`transformers.ProgressCallback`] with short lines."""


def shorten_printed_logs(callbacks: list[TrainerCallback]) -> None:
    """Put callbacks that print short lines in the place of transformers' own; those of a user stay."""
    short = {PrinterCallback: ShortPrinterCallback, ProgressCallback: ShortProgressCallback}
    for place, callback in enumerate(callbacks):
        if type(callback) in short:
            callbacks[place] = short[type(callback)]()


# ---- the log of a run ---------------------------------------------------------------------------------------------


class RunLogCallback(TrainerCallback):
    """Appends what is logged to `run_log.jsonl` in the output folder, by the main process. Whatever fails in it (a full
    disk) is a warning, and training goes on. ``facts`` gives what a report says of the run besides its numbers."""

    def __init__(self, facts: Callable[[], dict[str, Any]]):
        self.facts = facts
        self._log: RunLog | None = None
        self._pending: list[dict[str, Any]] = []
        self._warned = False

    def on_train_begin(self, args, state, control, **kwargs):
        with self._harmless():
            facts = self.facts()  # gathered here, where all processes are
            if not state.is_world_process_zero:
                return
            self._log = RunLog(args.output_dir)
            self._log.start(state.global_step, state.max_steps, facts, state.log_history)
        for evaluation in self._pending:
            self._write("evaluation", **evaluation)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.log_history:
            self._write("log", **{**state.log_history[-1], "step": state.global_step})

    def on_train_end(self, args, state, control, **kwargs):
        reason = "stopped early by a callback" if state.global_step < state.max_steps else "finished"
        self._write("end", step=state.global_step, reason=reason, error=None)

    def stopped_by(self, error: BaseException, state: TrainerState) -> None:
        """Note that training ended by an exception."""
        text = f"{type(error).__name__}: {error}"
        self._write("end", step=state.global_step, reason="stopped by an error", error=text)

    def add_evaluation(self, when: str, step: int, scores: dict[str, dict[str, float]]) -> None:
        """Log an evaluation, of any time before or after training; one of the same ``when`` replaces it in reports.
        Scores have ``accuracy`` and ``standard_error`` (0 to 1) and ``n``, the number of problems."""
        evaluation = {"when": when, "step": step, "scores": scores}
        if self._log is None:
            self._pending.append(evaluation)
        self._write("evaluation", **evaluation)

    def _write(self, kind: str, **entry: Any) -> None:
        if self._log is not None:
            with self._harmless():
                self._log.write(kind, **entry)

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Warn once of what fails: no line is worth a training run."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                kind = type(error).__name__
                get_logger().warning("%s is not complete: %s: %s; training goes on", RUN_LOG, kind, error)
            self._warned = True


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """Return model, scheme, counts of layers, options and which differ from their defaults, versions and machine."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    report = getattr(model, "quantization_report", None)
    config = getattr(model.config, "quantization_config", None)
    options = trainer.args.to_dict()
    return {
        "model": getattr(model.config, "_name_or_path", "") or type(model).__name__,
        "architecture": type(model).__name__,
        "parameters": count_parameters(model),
        "trained_parameters": sum(_size(p) for p in model.parameters() if p.requires_grad),
        "scheme": report.scheme if report else "full precision",
        "n_quantized": trainer.n_quantized,
        "n_skipped": report.n_skipped if report else None,
        "skipped": list(report.skipped[:8]) if report else [],
        "weight_sqnr_db": report.sqnr_db if report else None,
        "train_rows": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
        "options": options,
        "changed_options": _changed(trainer.args, options),
        "quantization": config.to_dict() if hasattr(config, "to_dict") else config,
        "processes": trainer.args.world_size,
        "device": str(trainer.args.device),
        "distributed": str(trainer.accelerator.distributed_type).removeprefix("DistributedType."),
        "precision": trainer.accelerator.mixed_precision,
        "versions": package_versions(),
        "machine": machine(),
    }


def count_parameters(model: nn.Module) -> int:
    """Return the elements of all parameters, of packed weights those that their bytes stand for."""
    return sum(_size(parameter) for parameter in model.parameters()) + uncounted_weights(model)


def _size(parameter: nn.Parameter) -> int:
    # Under ZeRO-3 the shape of a parameter that is sharded away is empty.
    return getattr(parameter, "ds_numel", parameter.numel())


def _changed(args: Any, options: dict[str, Any]) -> list[str]:
    """Names of the options whose values are not their defaults."""
    named = [option for option in fields(args) if option.init and option.name in options]
    defaults = {o.name: o.default if o.default_factory is MISSING else o.default_factory() for o in named}
    return [name for name, default in defaults.items() if getattr(args, name) != default]
