# SPDX-License-Identifier: Apache-2.0
"""The callback that writes `run_log.jsonl`, and the facts of a run that it writes first."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState

from ..._logging import get_logger
from ...layers import n_elements
from ...report import uncounted_weights
from ...utils import machine, package_versions
from ..run_log import RUN_LOG, RunLog


class RunLogCallback(TrainerCallback):
    """Appends what is logged to `run_log.jsonl` in the output folder, in the main process.

    An error in it, such as a full disk, is a warning, and training continues. ``facts`` returns what a report says of
    the run in addition to its numbers.
    """

    def __init__(self, facts: Callable[[], dict[str, Any]]):
        self.facts = facts
        self._log: RunLog | None = None
        self._pending: list[dict[str, Any]] = []
        self._warned = False

    def on_train_begin(self, args, state, control, **kwargs):
        with self._harmless():
            facts = self.facts()  # collective: all processes are here
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
        reason = "finished"
        if state.global_step < state.max_steps:
            reason = "stopped early by a callback"
        self._write("end", step=state.global_step, reason=reason, error=None)

    def stopped_by(self, error: BaseException, state: TrainerState) -> None:
        """Log that training ended by an exception."""
        text = f"{type(error).__name__}: {error}"
        self._write("end", step=state.global_step, reason="stopped by an error", error=text)

    def add_evaluation(self, when: str, step: int, scores: dict[str, list[bool]]) -> None:
        """Log an evaluation, before or after training too; reports show the last one of each ``when``.

        A score says of each problem whether it is solved, in the same order each time, so that evaluations can be
        compared problem by problem.
        """
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
        """Turn the first error into a warning, and ignore the others: no line is worth a training run."""
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
    options = trainer.args.to_dict()

    scheme = "full precision"
    n_skipped = None
    skipped: list[str] = []
    weight_sqnr_db = None
    report = getattr(model, "quantization_report", None)
    if report is not None:
        scheme = report.scheme
        n_skipped = report.n_skipped
        skipped = list(report.skipped[:8])
        weight_sqnr_db = report.sqnr_db

    quantization = getattr(model.config, "quantization_config", None)
    if hasattr(quantization, "to_dict"):
        quantization = quantization.to_dict()

    # An iterable dataset has no length.
    train_rows = None
    if hasattr(trainer.train_dataset, "__len__"):
        train_rows = len(trainer.train_dataset)

    return {
        "model": getattr(model.config, "_name_or_path", "") or type(model).__name__,
        "architecture": type(model).__name__,
        "parameters": count_parameters(model),
        "trained_parameters": sum(n_elements(p) for p in model.parameters() if p.requires_grad),
        "scheme": scheme,
        "n_quantized": trainer.n_quantized,
        "n_skipped": n_skipped,
        "skipped": skipped,
        "weight_sqnr_db": weight_sqnr_db,
        "train_rows": train_rows,
        "options": options,
        "changed_options": _changed(trainer.args, options),
        "quantization": quantization,
        "processes": trainer.args.world_size,
        "device": str(trainer.args.device),
        "distributed": str(trainer.accelerator.distributed_type).removeprefix("DistributedType."),
        "precision": trainer.accelerator.mixed_precision,
        "versions": package_versions(),
        "machine": machine(),
    }


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; of packed weights, of the weights that their bytes stand for."""
    return sum(n_elements(parameter) for parameter in model.parameters()) + uncounted_weights(model)


def _changed(args: Any, options: dict[str, Any]) -> list[str]:
    """Return the names of the options whose values are not their defaults."""
    changed = []
    for option in fields(args):
        if not option.init or option.name not in options:
            continue
        default = option.default
        if option.default_factory is not MISSING:
            default = option.default_factory()
        if getattr(args, option.name) != default:
            changed.append(option.name)
    return changed
