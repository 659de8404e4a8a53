# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints that are whole, that a run continues from to the bit, and one of them whenever a GRPO run ends
early: by an exception, Ctrl-C, or SIGTERM from a scheduler."""

import contextlib
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerState

from .._logging import get_logger
from ..checkpoint import invalidate, last_complete_checkpoint, own_names, why_incomplete, write_whole_manifest
from ..layers import random_layers
from ..utils import Mixin
from .callbacks import QuantizationStepCallback


class ExactResumeMixin(Mixin):
    """Checkpoints of a [`transformers.Trainer`] that a stopped or killed run continues from as if it had never stopped.

    For classes of your own: `class MyTrainer(ExactResumeMixin, Trainer)`; [`MXFP4GRPOTrainer`] has it. In addition to
    what a Trainer saves (weights, optimizer, schedule, random state of each process):

    * `resume_from_checkpoint=True` takes the newest checkpoint that is whole, one that is not is refused by name, and
      weights that are not finite are not saved as one;
    * the weights of fused experts are restored in full precision too, and a checkpoint that lacks weights is refused;
    * layers that draw random numbers are told the step, as by [`QuantizationStepCallback`], so that they draw the same;
    * rollouts that TRL trains on for several steps, and the position in them;
    * loss and metrics of TRL that are not logged yet, with `logging_steps` above 1;
    * the order of prompts in later epochs, for samplers with a generator of their own, such as TRL's;
    * the epoch of a stream, which is read from its beginning again and must yield the same examples;
    * resuming a run that had finished trains nothing, where a plain Trainer takes one more step;
    * under DeepSpeed in 16 bits the float32 master weights are saved, and under FSDP's sharded state dicts `save_model`
      writes a model.

    All processes must see the same folder. The state of a process is restored in the process of the same rank; under
    another number of processes random states start over, with a warning.
    """

    _epochs_begun = 0
    #: Loss that was not logged before the checkpoint, and the step that was logged last.
    _unlogged: tuple[torch.Tensor, int] | None = None
    _stream_position = 0, 0
    #: Options that decide which micro-batch of which rollout an optimizer step trains on.
    _SPLIT = ("steps_per_generation", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps")

    # ---- saving ---------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        name = _not_finite(self.model)
        if self.accelerator.reduce(torch.tensor(float(name is not None), device=self.args.device)).item():
            raise ValueError(
                f"step {self.state.global_step}: {name or 'a weight of another process'} holds NaN or infinity, so no "
                f"checkpoint is written; resume from an older one in {self.args.output_dir} with a lower learning_rate "
                "or another seed"
            )
        if self.args.should_save and folder.is_dir():
            invalidate(folder)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            write_whole_manifest(folder)  # trainer_state.json, which says that the others are complete
        self.accelerator.wait_for_everyone()

    def _save_rng_state(self, output_dir):
        # The last thing that every process writes; trainer_state.json and the removal of old checkpoints follow.
        super()._save_rng_state(output_dir)
        torch.save(self._process_state(), _state_file(output_dir, self.args.process_index))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_whole_manifest(output_dir)

    def _save(self, output_dir=None, state_dict=None):
        if self.is_deepspeed_enabled:
            state_dict = {} if state_dict is None else state_dict  # that of the other processes
            _replace_by_masters(self.model, state_dict)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        with own_names(model, output_dir):
            super()._save(output_dir, state_dict)

    def save_model(self, output_dir=None, _internal_call=False):
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if _internal_call or plugin is None or "FULL_STATE_DICT" in str(plugin.state_dict_type):
            return super().save_model(output_dir, _internal_call)
        sharded = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")  # under a sharded one a Trainer writes nothing
        try:
            return super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(sharded)

    def _process_state(self) -> dict[str, Any]:
        """Return what this process adds to a checkpoint: numbers, strings, tensors, lists and dictionaries of them."""
        state: dict[str, Any] = {"world_size": self.args.world_size}
        if hasattr(self, "_buffered_inputs"):
            # TRL samples for several optimizer steps at once, and a checkpoint may fall between two of them.
            split = {name: getattr(self.args, name, None) for name in self._SPLIT}
            state["rollouts"] = {"micro_step": self._step, "batches": self._buffered_inputs, "split": split}
            state["rollouts"]["tokens_seen"] = self.state.num_input_tokens_seen
        if hasattr(self, "_tr_loss"):
            state["unlogged"] = {"loss": self._tr_loss.clone(), "logged_step": self._globalstep_last_logged}
        if hasattr(self, "_metrics"):
            state["metrics"] = {name: [float(value) for value in of] for name, of in self._metrics["train"].items()}
        return state

    # ---- resuming -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train as [`transformers.Trainer.train`] does.

        Raises `ValueError` when the checkpoint is not whole, or there is none that is.
        """
        checkpoint = self._whole_checkpoint(resume_from_checkpoint)
        self._forget_step()
        if checkpoint is not None:
            self._restore_process(checkpoint)
        told = any(isinstance(callback, QuantizationStepCallback) for callback in self.callback_handler.callbacks)
        if random_layers(self.model) and not told:
            self.add_callback(QuantizationStepCallback())
        return super().train(checkpoint, *args, **kwargs)

    def _forget_step(self) -> None:
        """Forget what a training of this process that was cut short left of its last step."""
        self._unlogged = None
        for name, start in (("_step", 0), ("_buffered_inputs", None), ("_entropy_window_stats", None)):
            if hasattr(self, name):  # TRL's
                setattr(self, name, start)
        if hasattr(self, "_metrics"):
            self._metrics["train"].clear()

    def _whole_checkpoint(self, choice: str | bool | None) -> str | None:
        if choice is None or choice is False:
            return None
        # One process looks: the others may see the folder later than it is complete.
        found: list = [None, None]
        if self.accelerator.is_main_process:
            started = time.monotonic()
            if choice is True:
                found[0] = last_complete_checkpoint(self.args.output_dir, checksums=True)
            else:
                found = [str(choice), why_incomplete(choice, checksums=True)]
            get_logger().info("checksums of checkpoints were compared in %.0f s", time.monotonic() - started)
        path, reason = broadcast_object_list(found)
        if path is None:
            raise ValueError(
                f"nothing to resume: {self.args.output_dir} holds no complete checkpoint (see save_strategy and "
                "save_steps); start without resume_from_checkpoint"
            )
        if reason is not None:
            raise ValueError(
                f"{path} cannot be resumed from: {reason}; give another checkpoint, or True for the newest complete one"
            )
        return path

    def _init_training_state(self, max_steps, steps_per_epoch, num_epochs, checkpoint, trial):
        position = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, checkpoint, trial)
        if checkpoint is None or num_epochs != sys.maxsize:  # which stands for a data loader without a length
            return position
        # A Trainer counts all steps as one epoch, whose batches it would skip.
        epochs, steps = self._stream_position
        if not hasattr(self.train_dataset, "state_dict"):
            get_logger().warning(
                "%s is read again from the beginning of an epoch (%d), and %d steps are skipped: this run repeats one "
                "that was never stopped only if the stream yields the same examples again",
                type(self.train_dataset).__name__, epochs, steps,
            )  # fmt: skip
        return epochs, 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps

    def _run_epoch(self, *args, resume_from_checkpoint=None, **kwargs):
        # A Trainer takes one step more when it resumes from the last checkpoint of a finished run.
        if self.state.global_step >= self.state.max_steps:
            self._load_rng_state(resume_from_checkpoint)
            self.control.should_training_stop = True
            return
        if self._unlogged is not None:  # a Trainer starts over when training begins
            (self._tr_loss, self._globalstep_last_logged), self._unlogged = self._unlogged, None
        super()._run_epoch(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _restore_process(self, checkpoint: str) -> None:
        saved = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
        epoch = saved.epoch or 0.0
        self._epochs_begun = math.floor(epoch)
        # An epoch without a length counts as `max_steps` steps, which it reaches only at the end of training.
        before = max(math.ceil(epoch) - 1, 0)
        self._stream_position = before, round((epoch - before) * saved.max_steps)
        file = _state_file(checkpoint, self.args.process_index)
        file = file if file.is_file() else _state_file(checkpoint, 0)
        reason = "was not written by a trainer with ExactResumeMixin, or holds the model alone (save_only_model)"
        if file.is_file():
            device = "cpu" if self.args.device.type == "cpu" else self.args.device  # torch.load knows no "cpu:0"
            state = torch.load(file, map_location=device, weights_only=True)
            if state["world_size"] == self.args.world_size:
                self._load_process_state(state)
                return
            reason = f"was written by {state['world_size']} processes and is resumed by {self.args.world_size}"
        get_logger().warning(
            "%s %s: what it lacks, or random states, start over, so that this run does not repeat one that was never "
            "stopped", checkpoint, reason,
        )  # fmt: skip

    def _load_process_state(self, state: dict[str, Any]) -> None:
        """Restore what [`_process_state`] returned, in a process of the same rank."""
        if "unlogged" in state:
            self._unlogged = state["unlogged"]["loss"], state["unlogged"]["logged_step"]
            self._tr_loss, self._globalstep_last_logged = self._unlogged
        if "metrics" in state and hasattr(self, "_metrics"):
            self._metrics["train"].clear()
            self._metrics["train"].update(state["metrics"])
        if "rollouts" not in state or not hasattr(self, "_buffered_inputs"):
            return
        rollouts, split = state["rollouts"], self._process_state()["rollouts"]["split"]
        before = split | rollouts.get("split", {})  # older checkpoints lack some
        self.state.num_input_tokens_seen = rollouts["tokens_seen"]
        if before == split:
            self._step, self._buffered_inputs = rollouts["micro_step"], rollouts["batches"]
        else:
            get_logger().warning(
                "the checkpoint was written with %s and is resumed with %s: rollouts start over, so that this run "
                "does not repeat one that was never stopped", before, split,
            )  # fmt: skip

    def _get_train_sampler(self, *args: Any) -> Sampler | None:
        # A sampler's own generator draws the order of an epoch when it begins.
        sampler = super()._get_train_sampler(*args)
        begun, self._epochs_begun = self._epochs_begun, 0
        for _ in range(begun if getattr(sampler, "generator", None) is not None else 0):
            next(iter(sampler), None)
        return sampler

    def _issue_warnings_after_load(self, load_result):
        keys = set(load_result.missing_keys)
        named = list(self.model.named_parameters(remove_duplicate=False))
        loaded = {id(parameter) for name, parameter in named if name not in keys}  # under any of its tied names
        missing = {id(p): name for name, p in reversed(named) if id(p) not in loaded}
        if missing:
            raise ValueError(
                f"the checkpoint has no weights for {len(missing)} parameters of the model, among them "
                f"{list(missing.values())[-1]}, which would keep the values that the model was loaded with. If they "
                "are experts, a trainer without ExactResumeMixin wrote it from a model in full precision: load the "
                "checkpoint itself as the model instead of resuming"
            )
        super()._issue_warnings_after_load(load_result)


def _not_finite(model: nn.Module, gradients: bool = False) -> str | None:
    """Return the name of the first trained parameter that has NaN or infinity, also in its gradient; or `None`."""
    named = [(n, p.grad if gradients else p.detach()) for n, p in model.named_parameters() if p.requires_grad]
    local = [(n, getattr(t, "_local_tensor", t)) for n, t in named if t is not None and t.numel()]
    # The largest magnitude is NaN or infinite where any element is; a norm of large numbers could overflow.
    largest = [(n, torch.linalg.vector_norm(t, torch.inf)) for n, t in local if t.numel()]
    if not largest:
        return None
    finite = torch.stack([value.float().to(largest[0][1].device) for _, value in largest]).isfinite().tolist()
    return next((name for (name, _), good in zip(largest, finite, strict=True) if not good), None)


def _replace_by_masters(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Put the float32 weights of DeepSpeed's optimizer in the place of their 16-bit copies. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            master = safe_get_full_fp32_param(parameter)
            if master is not None and name in state_dict:
                state_dict[name] = master.view(state_dict[name].shape).cpu()


def keep_random_states() -> Callable[[], None]:
    """Return a function that puts the global random generators of this process back to what they are now."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return restore


def _state_file(checkpoint: str, rank: int) -> Path:
    return Path(checkpoint) / f"mxfp4_state_{rank}.pt"


# ---- the checkpoint of a run that ends early ----------------------------------------------------------------------


class Terminated(SystemExit):
    """SIGTERM reached the process that trains. Its exit code is the one that shells give for it, 143."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "SIGTERM"


class CheckpointOnExit(TrainerCallback):
    """Saves the last finished optimizer step when training ends early, with the random states and rollouts of its end,
    and stops an update that is not finite. SIGTERM and Ctrl-C are held back while the optimizer updates weights, until
    the step is logged."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._update: int | None = None
        self._is_logging = False
        self._learning_rate = 0.0
        self._waiting: BaseException | None = None
        self._has_begun = False  # before its first step the state of a resumed run may not have been restored
        self._step: int | None = None
        self._restore_random: Callable[[], None] = lambda: None
        self._state: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._step = self._update = self._waiting = None
        self._has_begun = False
        if self.trainer.is_deepspeed_enabled:
            # It updates weights inside of the backward pass, unless a gradient is not finite.
            engine = self.trainer.accelerator.deepspeed_engine_wrapped.engine
            engine.basic_optimizer.register_step_pre_hook(self._on_update)

    def _on_update(self, *args: Any) -> None:
        self._update = self.trainer.state.global_step

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.remember(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        # An epoch's data loader draws a number before its first step: there, the state before it counts.
        if self._step != state.global_step:
            self.remember(state.global_step)
        self._has_begun = True
        self._raise_what_waits()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        # In float16 the optimizer itself leaves out updates that are not finite.
        if self.trainer.accelerator.scaler is None and (name := _not_finite(model, gradients=True)) is not None:
            raise FloatingPointError(
                f"the gradient of step {state.global_step + 1} holds NaN or infinity, among others that of {name}; the "
                "weights were not changed. Look for such values in the rewards and logs of this step; a run that is "
                "resumed repeats it unless learning_rate, the scheme, seed or data change"
            )
        self._update = state.global_step

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._learning_rate = self.trainer._get_learning_rate()  # which is logged, before the schedule moves on

    def on_step_end(self, args, state, control, **kwargs):
        if not control.should_log:
            self._update = None

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Hold signals back during a log; that of a finished step ends its update."""
        self._is_logging = True
        try:
            yield
        finally:
            self._is_logging = False
            if self._update != self.trainer.state.global_step:
                self._update = None

    def remember(self, step: int) -> None:
        """Take the states of now for those of the end of optimizer step ``step``."""
        self._step, self._restore_random, self._state = step, keep_random_states(), self.trainer._process_state()

    @contextlib.contextmanager
    def at_step_end(self) -> Iterator[None]:
        """Put random states, rollouts and logs back to the end of the last step, if the next one has begun, while a
        checkpoint is saved."""
        trainer = self.trainer
        if self._step != trainer.state.global_step:
            yield
            return
        restore_random, state = keep_random_states(), trainer._process_state()
        self._restore_random()
        trainer._load_process_state(self._state)
        try:
            yield
        finally:
            restore_random()
            trainer._load_process_state(state)

    @contextlib.contextmanager
    def checkpoint_on_exit(self) -> Iterator[None]:
        """Save the last finished step whenever this context ends by an exception."""
        # Several processes could not save together, each somewhere else; signals end them as they always do.
        single = self.trainer.accelerator.num_processes == 1
        try:
            with self._signals_as_exceptions() if single else contextlib.nullcontext():
                yield
        except BaseException as error:
            self._save(f"training stopped at step {self.trainer.state.global_step} by {type(error).__name__}: {error}")
            # After what was trained is saved: a scheduler may not wait.
            if self.trainer.run_log is not None:
                self.trainer.run_log.stopped_by(error, self.trainer.state)
            raise

    @contextlib.contextmanager
    def _signals_as_exceptions(self) -> Iterator[None]:
        """Have SIGTERM raise [`Terminated`], and neither it nor Ctrl-C interrupt an update; a second one does not wait.
        Only in the main thread, and only in place of the handlers that Python starts with."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
        taken = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
        for number in taken:
            signal.signal(number, self._handle)
        try:
            yield
            self._raise_what_waits()
        finally:
            for number in taken:
                signal.signal(number, usual[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        error = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        is_held = self._is_logging or self._update is not None
        if not is_held or self._waiting is not None:
            raise error
        self._waiting = error

    def _raise_what_waits(self) -> None:
        error, self._waiting = self._waiting, None
        if error is not None:
            raise error

    def _save(self, what: str) -> None:
        trainer, logger = self.trainer, get_logger()
        reason = self._why_unsaved()
        if reason is not None:
            logger.error("%s%s", what, reason)
            return
        step = trainer.state.global_step
        folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{step}"
        try:
            if why_incomplete(folder) is not None:
                self._finish_log(step)
                trainer._save_checkpoint(trainer.model, trial=None)
        except Exception as failure:
            kind = type(failure).__name__
            logger.error("%s; saving failed too: %s: %s; %s", what, kind, failure, self._newest_checkpoint())
        else:
            logger.error("%s; saved as %s, resume with resume_from_checkpoint", what, folder)

    def _why_unsaved(self) -> str | None:
        step = self.trainer.state.global_step
        if not self._has_begun or step == 0:
            return "; nothing was trained yet, so nothing was saved"
        reason = None
        if self.trainer.accelerator.num_processes > 1:
            # Sharded weights are gathered by all ranks together, and the others may not be here.
            reason = "; not saved, since other processes may still be training"
        elif self._update == step:  # a step is counted after its update
            reason = ", in the middle of an update; not saved, since the weights are half-updated"
        return reason and f"{reason}; {self._newest_checkpoint()}"

    def _newest_checkpoint(self) -> str:
        path = last_complete_checkpoint(self.trainer.args.output_dir)
        if path is None:
            return f"there is no whole checkpoint in {self.trainer.args.output_dir}"
        return f"the newest whole checkpoint is {path}, resume with resume_from_checkpoint"

    def _finish_log(self, step: int) -> None:
        """Log step ``step`` if it ended before its log, so that the next one's does not average what it measured."""
        trainer = self.trainer
        if self._step == step:
            return
        if trainer.control.should_log:
            trainer.control.should_evaluate = trainer.control.should_save = False
            loss, rate = trainer._tr_loss, self._learning_rate
            try:
                trainer._maybe_log_save_evaluate(loss, trainer._grad_norm, trainer.model, None, 0.0, None, None, rate)
            except Exception as failure:
                get_logger().error("logging it failed too: %s: %s", type(failure).__name__, failure)
        if trainer._globalstep_last_logged == step:  # if a callback failed, they are left
            trainer._metrics["train"].clear()
