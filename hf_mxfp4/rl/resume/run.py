# SPDX-License-Identifier: Apache-2.0
"""What a GRPO run has in a checkpoint beside what every Trainer has, and the checkpoint that it leaves when it ends
early."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler
from transformers import TrainerState
from trl import GRPOTrainer

from ..._logging import get_logger
from ...checkpoint import why_incomplete
from .boundary import StepBoundary
from .interruption import free_gigabytes, newest_checkpoint, signals_as_exceptions, why_unsaved


class RunCheckpoints:
    """Reads and sets the attributes of a trainer (TRL's, most of them) that make a resumed run go on as it would have.

    Attributes:
        boundary: the callback that remembers where the last finished step left off.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.boundary = StepBoundary(trainer._process_state, trainer.accelerator.scaler is not None)
        self._epochs_begun = 0

    # ---- the state of a process -----------------------------------------------------------------------------------

    def process_state(self) -> dict[str, Any]:
        """Return where the run is among its rollouts, and the entropy coefficient."""
        trainer = self.trainer
        # Completions are sampled for several optimizer steps at once, and a checkpoint may fall between two of them.
        rollouts = {
            "micro_step": trainer._step,
            "batches": trainer._buffered_inputs,
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "split": self.batch_split(),
        }
        # TRL writes these two as well, but after the checkpoint is complete.
        entropy = {"coefficient": trainer.entropy_coef, "last": trainer._last_world_entropy}
        return {"rollouts": rollouts, "entropy": entropy}

    def batch_split(self) -> dict[str, int]:
        """Return what decides which micro-batch of which rollout an optimizer step trains on."""
        return {
            "steps_per_generation": self.trainer.args.steps_per_generation,
            "num_iterations": self.trainer.num_iterations,
            "per_device_train_batch_size": self.trainer.args.per_device_train_batch_size,
        }

    def load_process_state(self, state: dict[str, Any], exact: bool) -> None:
        """Restore what [`process_state`] returned; unless ``exact``, in another process."""
        trainer = self.trainer
        if exact:
            rollouts = state["rollouts"]
            split = self.batch_split()
            before = rollouts.get("split", split)  # unknown in older checkpoints
            if before == split:
                trainer._step, trainer._buffered_inputs = rollouts["micro_step"], rollouts["batches"]
            else:
                get_logger().warning(
                    "the checkpoint was written with %s and is resumed with %s: rollouts start anew, so that this run "
                    "does not repeat one that was never stopped",
                    ", ".join(f"{name}={value}" for name, value in before.items()),
                    ", ".join(f"{name}={value}" for name, value in split.items()),
                )
            trainer.state.num_input_tokens_seen = rollouts["tokens_seen"]
        if trainer.use_adaptive_entropy:
            trainer.entropy_coef = state["entropy"]["coefficient"]
            trainer._last_world_entropy = state["entropy"]["last"]

    # ---- the order of prompts -------------------------------------------------------------------------------------

    def read_epoch(self, checkpoint: str) -> None:
        """Note how many epochs had begun, for [`skip_epochs`]."""
        self._epochs_begun = math.floor(TrainerState.load_from_json(f"{checkpoint}/trainer_state.json").epoch or 0)
        if self.trainer.args.sync_ref_model:
            get_logger().warning(
                "the synchronized reference policy is not in checkpoints: it starts from the model again"
            )

    def skip_epochs(self, sampler: Sampler) -> Sampler:
        """The sampler of a trainer, whose own generator draws the order of prompts once an epoch, after the epochs that
        had begun."""
        for _ in range(self._epochs_begun):
            next(iter(sampler), None)
        self._epochs_begun = 0
        return sampler

    # ---- a run that ends early ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def left_behind(self) -> Iterator[None]:
        """Whatever ends training early within this context leaves a checkpoint of the last finished step behind."""
        # Several processes could not save together, each somewhere else; signals end them as they always do.
        single = self.trainer.accelerator.num_processes == 1
        try:
            with signals_as_exceptions(self.boundary) if single else contextlib.nullcontext():
                yield
        except BaseException as error:
            self._save_before_leaving(error)
            # After what was trained is saved: a scheduler may not wait.
            if self.trainer.monitor.report is not None:
                self.trainer.monitor.report.stopped_by(error, self.trainer.state)
            raise

    def _save_before_leaving(self, error: BaseException) -> None:
        trainer, logger = self.trainer, get_logger()
        step, output_dir = trainer.state.global_step, trainer.args.output_dir
        trained = step if self.boundary.has_begun else 0
        what = f"training stopped at step {step} by {type(error).__name__}: {error}"
        reason = why_unsaved(trained, trainer.accelerator.num_processes, self.boundary, output_dir)
        if reason is not None:
            logger.error("%s%s", what, reason)
            return
        folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{step}"
        try:
            if why_incomplete(folder) is not None:
                state = self.boundary.rewind(step)
                if state is not None:
                    trainer._load_process_state(state, exact=True)
                    trainer._metrics["train"].clear()  # of what the step that failed had added
                elif trainer.control.should_log:
                    self._log_what_there_is()
                trainer._save_checkpoint(trainer.model, trial=None)
        except Exception as failure:
            logger.error(
                "%s; saving failed too: %s: %s (%s GB are free there); %s",
                what,
                type(failure).__name__,
                failure,
                free_gigabytes(output_dir),
                newest_checkpoint(output_dir),
            )
        else:
            logger.error("%s; saved as %s, resume with resume_from_checkpoint", what, folder)

    def _log_what_there_is(self) -> None:
        """A line for a step that ended before its log: what was measured must not be averaged into the next one's."""
        try:
            self.trainer.log({})
        except Exception as failure:
            get_logger().error("logging it failed too: %s: %s", type(failure).__name__, failure)
