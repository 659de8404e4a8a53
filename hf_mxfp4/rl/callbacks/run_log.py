# SPDX-License-Identifier: Apache-2.0
"""The callback that writes `run_log.jsonl`, of which `hf-mxfp4 report` and [`hf_mxfp4.lab.RunReportCallback`] make a
report."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState

from ..._logging import get_logger
from ...run_log import RUN_LOG, RunLog
from ...utils import machine, package_versions


class RunLogCallback(TrainerCallback):
    """Appends what is logged to `run_log.jsonl` in the output folder, by the main process. Whatever fails in it (a full
    disk) is a warning, and training goes on.

    Args:
        facts: gives what a report says about the run besides its numbers, once it begins.
    """

    def __init__(self, facts: Callable[[], dict[str, Any]]):
        self.facts = facts
        self._log: RunLog | None = None
        self._pending: list[dict[str, Any]] = []
        self._warned = False

    def on_train_begin(self, args, state, control, **kwargs):
        # The facts are gathered here, where all processes are.
        with self._harmless():
            facts = self.facts()
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
        early = state.global_step < state.max_steps
        reason = "stopped early by a callback" if early else "finished"
        self._write("end", step=state.global_step, reason=reason, error=None)

    def stopped_by(self, error: BaseException, state: TrainerState) -> None:
        """Note that training ended by an exception."""
        text = f"{type(error).__name__}: {error}"
        self._write("end", step=state.global_step, reason="stopped by an error", error=text)

    def add_evaluation(self, when: str, step: int, scores: dict[str, dict[str, float]]) -> None:
        """Log an evaluation, of any time before or after training; one of the same ``when`` replaces it in reports.

        Args:
            scores: by name, ``accuracy`` and ``standard_error`` (0 to 1) and ``n``, the number of problems.
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
        """Warn once of what fails: no line is worth a training run."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                get_logger().warning(
                    "%s is not complete: %s: %s; training goes on", RUN_LOG, type(error).__name__, error
                )
            self._warned = True


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """Return model, scheme, counts of layers, every option (tokens blanked out) and which differ from their defaults,
    versions and machine; JSON-clean."""
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
    """Return the elements of all parameters, those of packed weights included: the elements that they stand for, and
    not the bytes that hold them, which transformers' `num_parameters` counts."""
    report = getattr(model, "quantization_report", None)
    if report is None or report.packed_bytes is None:
        return sum(_size(parameter) for parameter in model.parameters())
    return report.n_weights + sum(_size(p) for p in model.parameters() if p.is_floating_point())


def _size(parameter: nn.Parameter) -> int:
    # Under ZeRO-3 the shape of a parameter that is sharded away is empty.
    return getattr(parameter, "ds_numel", parameter.numel())


def _changed(args: Any, options: dict[str, Any]) -> list[str]:
    """Names of the options whose values are not their defaults."""
    changed = []
    for option in fields(args):
        default = option.default_factory() if option.default_factory is not MISSING else option.default
        if option.init and option.name in options and getattr(args, option.name) != default:
            changed.append(option.name)
    return changed
