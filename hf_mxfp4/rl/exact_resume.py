# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints that are whole, and that a run continues from to the bit."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import Sampler
from transformers import TrainerState

from .._logging import get_logger
from ..checkpoint import invalidate, last_complete_checkpoint, own_names, why_incomplete, write_whole_manifest
from ..layers import random_layers
from ..utils import Mixin
from .callbacks.quantization_step import QuantizationStepCallback


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

    #: Epochs whose order the sampler has to draw again.
    _epochs_begun = 0
    #: Loss that was not logged before the checkpoint, and the step that was logged last.
    _unlogged: tuple[torch.Tensor, int] | None = None
    #: Epochs and steps of a stream before the checkpoint.
    _stream_position = 0, 0
    _SPLIT = ("steps_per_generation", "num_iterations", "per_device_train_batch_size", "gradient_accumulation_steps")

    # ---- saving ---------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        name = first_not_finite(self.model)
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
            if state_dict is None:  # in the processes that write nothing
                state_dict = {}
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
            state["rollouts"] = {
                "micro_step": self._step,
                "batches": self._buffered_inputs,
                "split": self._split(),
                "tokens_seen": self.state.num_input_tokens_seen,
            }
        if hasattr(self, "_tr_loss"):
            state["unlogged"] = {"loss": self._tr_loss.clone(), "logged_step": self._globalstep_last_logged}
        if hasattr(self, "_metrics"):
            metrics = self._metrics["train"]
            state["metrics"] = {name: [float(value) for value in values] for name, values in metrics.items()}
        return state

    def _split(self) -> dict[str, Any]:
        """Return the options that decide which micro-batch of which rollout an optimizer step trains on."""
        return {name: getattr(self.args, name, None) for name in self._SPLIT}

    # ---- resuming -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train as [`transformers.Trainer.train`] does.

        Raises `ValueError` when the checkpoint is not whole, or there is none that is.
        """
        checkpoint = self._whole_checkpoint(resume_from_checkpoint)
        self._forget_step()
        if checkpoint is not None:
            self._restore_process(checkpoint)
        callbacks = self.callback_handler.callbacks
        has_callback = any(isinstance(callback, QuantizationStepCallback) for callback in callbacks)
        if random_layers(self.model) and not has_callback:
            self.add_callback(QuantizationStepCallback())
        return super().train(checkpoint, *args, **kwargs)

    def _forget_step(self) -> None:
        """Forget the unfinished step of an earlier training of this process that was cut short."""
        self._unlogged = None
        for name, start in {"_step": 0, "_buffered_inputs": None, "_entropy_window_stats": None}.items():
            if hasattr(self, name):  # TRL's
                setattr(self, name, start)
        if hasattr(self, "_metrics"):
            self._metrics["train"].clear()

    def _whole_checkpoint(self, choice: str | bool | None) -> str | None:
        """Return the checkpoint to resume from, once its checksums were compared; `None` to start over."""
        if choice is None or choice is False:
            return None
        path = reason = None
        # One process looks: the others may see the folder later than it is complete.
        if self.accelerator.is_main_process:
            started = time.monotonic()
            if choice is True:
                path = last_complete_checkpoint(self.args.output_dir, checksums=True)
            else:
                path = str(choice)
                reason = why_incomplete(choice, checksums=True)
            get_logger().info("checksums of checkpoints were compared in %.0f s", time.monotonic() - started)
        path, reason = broadcast_object_list([path, reason])
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
        if self.args.ignore_data_skip:
            return epochs, 0
        return epochs, steps * self.args.gradient_accumulation_steps

    def _run_epoch(self, *args, resume_from_checkpoint=None, **kwargs):
        # A Trainer takes one step more when it resumes from the last checkpoint of a finished run.
        if self.state.global_step >= self.state.max_steps:
            self._load_rng_state(resume_from_checkpoint)
            self.control.should_training_stop = True
            return
        if self._unlogged is not None:  # a Trainer starts over when training begins
            self._tr_loss, self._globalstep_last_logged = self._unlogged
            self._unlogged = None
        super()._run_epoch(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _restore_process(self, checkpoint: str) -> None:
        saved = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
        epoch = saved.epoch or 0.0
        self._epochs_begun = math.floor(epoch)
        # An epoch without a length counts as `max_steps` steps, which it reaches only at the end of training.
        before = max(math.ceil(epoch) - 1, 0)
        self._stream_position = before, round((epoch - before) * saved.max_steps)
        file = _state_file(checkpoint, self.args.process_index)
        has_own = file.is_file()
        if not has_own:
            file = _state_file(checkpoint, 0)  # which says how many processes there were
        reason = "was not written by a trainer with ExactResumeMixin, or holds the model alone (save_only_model)"
        if file.is_file():
            device = "cpu" if self.args.device.type == "cpu" else self.args.device  # torch.load knows no "cpu:0"
            state = torch.load(file, map_location=device, weights_only=True)
            if state["world_size"] != self.args.world_size:
                reason = f"was written by {state['world_size']} processes and is resumed by {self.args.world_size}"
            elif has_own:
                self._load_process_state(state)
                return
            else:
                reason = f"lacks the state of process {self.args.process_index}"
        get_logger().warning(
            "%s %s: what it lacks, or random states, start over, so that this run does not repeat one that was never "
            "stopped", checkpoint, reason,
        )  # fmt: skip

    def _load_process_state(self, state: dict[str, Any]) -> None:
        """Restore what [`_process_state`] returned, in a process of the same rank."""
        if "unlogged" in state:
            self._tr_loss = state["unlogged"]["loss"]
            self._globalstep_last_logged = state["unlogged"]["logged_step"]
            self._unlogged = self._tr_loss, self._globalstep_last_logged
        if "metrics" in state and hasattr(self, "_metrics"):
            self._metrics["train"].clear()
            self._metrics["train"].update(state["metrics"])
        if "rollouts" not in state or not hasattr(self, "_buffered_inputs"):
            return
        rollouts = state["rollouts"]
        self.state.num_input_tokens_seen = rollouts["tokens_seen"]
        if rollouts["split"] != self._split():
            get_logger().warning(
                "the checkpoint was written with %s and is resumed with %s: rollouts start over, so that this run "
                "does not repeat one that was never stopped", rollouts["split"], self._split(),
            )  # fmt: skip
            return
        self._step = rollouts["micro_step"]
        self._buffered_inputs = rollouts["batches"]

    def _get_train_sampler(self, *args: Any) -> Sampler | None:
        # A sampler's own generator draws the order of an epoch when it begins.
        sampler = super()._get_train_sampler(*args)
        if getattr(sampler, "generator", None) is not None:
            for _ in range(self._epochs_begun):
                next(iter(sampler), None)
        self._epochs_begun = 0
        return sampler

    def _issue_warnings_after_load(self, load_result):
        missing_keys = set(load_result.missing_keys)
        named = list(self.model.named_parameters(remove_duplicate=False))
        # A parameter is loaded under any of its tied names.
        loaded = {id(parameter) for name, parameter in named if name not in missing_keys}
        missing = [name for name, parameter in self.model.named_parameters() if id(parameter) not in loaded]
        if missing:
            raise ValueError(
                f"the checkpoint has no weights for {len(missing)} parameters of the model, among them "
                f"{missing[0]}, which would keep the values that the model was loaded with. If they "
                "are experts, a trainer without ExactResumeMixin wrote it from a model in full precision: load the "
                "checkpoint itself as the model instead of resuming"
            )
        super()._issue_warnings_after_load(load_result)


def first_not_finite(model: nn.Module, gradients: bool = False) -> str | None:
    """Return the name of the first trained parameter of this process that holds NaN or infinity, or whose gradient
    does; `None` where there is none."""
    ends = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        tensor = getattr(tensor, "_local_tensor", tensor)
        if parameter.requires_grad and tensor is not None and tensor.numel():
            # Both are NaN where any element is; a norm of large numbers could overflow, and on CPUs is slow.
            ends[name] = torch.stack(torch.aminmax(tensor)).float()
    if not ends:
        return None
    device = next(iter(ends.values())).device
    finite = torch.stack([both.to(device) for both in ends.values()]).isfinite().all(1).tolist()
    return next((name for name, good in zip(ends, finite, strict=True) if not good), None)


def _replace_by_masters(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Put the float32 weights of DeepSpeed's optimizer in the place of their 16-bit copies. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            master = safe_get_full_fp32_param(parameter)
            if master is not None and name in state_dict:
                state_dict[name] = master.view(state_dict[name].shape).cpu()


def _state_file(checkpoint: str, rank: int) -> Path:
    return Path(checkpoint) / f"mxfp4_state_{rank}.pt"
