# SPDX-License-Identifier: Apache-2.0
"""Training checkpoints that are whole, and that a run continues from to the bit."""

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerState

from .._logging import get_logger
from ..checkpoint import checkpoint_step, invalidate, last_complete_checkpoint, why_incomplete, write_whole_manifest
from ..layers import random_layers
from .callbacks.entropy import QuantizationStepCallback


class ExactResumeMixin:
    """Checkpoints of a [`transformers.Trainer`] that a stopped or killed run continues from as if it had never stopped.

    For classes of your own: `class MyTrainer(ExactResumeMixin, Trainer)`; [`MXFP4GRPOTrainer`] has it. In addition to
    what a Trainer saves (weights, optimizer, schedule, random state of each process):

    * `resume_from_checkpoint=True` takes the newest checkpoint that is whole, one that is not is refused by name, and
      weights that are not finite are not saved as one;
    * the weights of fused experts are restored (their names in a plain Trainer's checkpoint are those of single
      experts, which its resuming passes over with a warning), and a checkpoint that lacks weights is refused;
    * layers that draw random numbers are told the step, as by [`QuantizationStepCallback`], so that they draw the same;
    * the order of prompts in later epochs, for samplers with a generator of their own, such as TRL's;
    * resuming a run that had finished trains nothing, where a plain Trainer takes one more step;
    * under DeepSpeed in 16 bits the float32 master weights are saved, and under FSDP's sharded state dicts `save_model`
      writes a model.

    All processes must see the same folder. The state of a process is restored in the process of the same rank; under
    another number of processes random states start over, with a warning.
    """

    _epochs_begun = 0

    # ---- saving ---------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        name = not_finite(self.model)
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
            replace_by_masters(self.model, state_dict)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        conversions = getattr(model, "_weight_conversions", None)
        if not conversions or output_dir is None or checkpoint_step(output_dir) is None:
            return super()._save(output_dir, state_dict)
        # Resuming loads by the names of the parameters, so they are not to be turned into those of the Hub's files.
        model._weight_conversions = []
        try:
            return super()._save(output_dir, state_dict)
        finally:
            model._weight_conversions = conversions

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
        return {"world_size": self.args.world_size}

    # ---- resuming -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """Train as [`transformers.Trainer.train`] does.

        Raises `ValueError` when the checkpoint is not whole, or there is none that is.
        """
        checkpoint = self._whole_checkpoint(resume_from_checkpoint)
        if checkpoint is not None:
            self._restore_process(checkpoint)
        if random_layers(self.model) and not _has(self, QuantizationStepCallback):
            self.add_callback(QuantizationStepCallback())
        return super().train(checkpoint, *args, **kwargs)

    def _whole_checkpoint(self, choice: str | bool | None) -> str | None:
        if choice is None or choice is False:
            return None
        # One process looks: the others may see the folder later than it is complete.
        found: list = [None, None]
        if self.accelerator.is_main_process:
            path = last_complete_checkpoint(self.args.output_dir) if choice is True else str(choice)
            found = [path, why_incomplete(path) if path is not None and choice is not True else None]
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

    def _run_epoch(self, *args, resume_from_checkpoint=None, **kwargs):
        # A Trainer takes one step more when it resumes from the last checkpoint of a finished run.
        if self.state.global_step >= self.state.max_steps:
            self._load_rng_state(resume_from_checkpoint)
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _restore_process(self, checkpoint: str) -> None:
        self._epochs_begun = math.floor(TrainerState.load_from_json(f"{checkpoint}/trainer_state.json").epoch or 0)
        file = _state_file(checkpoint, self.args.process_index)
        file = file if file.is_file() else _state_file(checkpoint, 0)
        if not file.is_file():
            get_logger().warning(
                "%s was not written by a trainer with ExactResumeMixin, or holds the model alone (save_only_model): "
                "what it lacks starts over, so that this run does not repeat one that was never stopped",
                checkpoint,
            )
            return
        device = "cpu" if self.args.device.type == "cpu" else self.args.device  # torch.load knows no "cpu:0"
        state = torch.load(file, map_location=device, weights_only=True)
        if state["world_size"] == self.args.world_size:
            self._load_process_state(state)
        else:
            get_logger().warning(
                "%s was written by %d processes and is resumed by %d: random states start over, so that this run does "
                "not repeat one that was never stopped",
                checkpoint,
                state["world_size"],
                self.args.world_size,
            )

    def _load_process_state(self, state: dict[str, Any]) -> None:
        """Restore what [`_process_state`] returned, in a process of the same rank."""

    def _get_train_sampler(self, *args: Any) -> Sampler | None:
        # A sampler's own generator draws the order of an epoch when it begins.
        sampler = super()._get_train_sampler(*args)
        begun, self._epochs_begun = self._epochs_begun, 0
        for _ in range(begun if getattr(sampler, "generator", None) is not None else 0):
            next(iter(sampler), None)
        return sampler

    def _issue_warnings_after_load(self, load_result):
        missing = missing_parameters(self.model, load_result.missing_keys)
        if missing:
            raise ValueError(
                f"the checkpoint has no weights for {len(missing)} parameters of the model, among them {missing[0]}, "
                "which would keep the values that the model was loaded with. If they are experts, it was written by a "
                "trainer without ExactResumeMixin: load the checkpoint itself as the model instead of resuming"
            )
        super()._issue_warnings_after_load(load_result)


def _has(trainer: Trainer, kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in trainer.callback_handler.callbacks)


def not_finite(model: nn.Module, gradients: bool = False) -> str | None:
    """Return the name of the first trained parameter that holds NaN or infinity, or whose gradient does; `None` for
    none. Sharded ones are looked at where this process has them."""
    named = [(n, p.grad if gradients else p.detach()) for n, p in model.named_parameters() if p.requires_grad]
    local = [(n, getattr(t, "_local_tensor", t)) for n, t in named if t is not None and t.numel()]
    # The largest magnitude is NaN or infinite where any element is; a norm of large numbers could overflow.
    largest = [(n, torch.linalg.vector_norm(t, torch.inf)) for n, t in local if t.numel()]
    if not largest:
        return None
    finite = torch.stack([value.float().to(largest[0][1].device) for _, value in largest]).isfinite().tolist()
    return next((name for (name, _), good in zip(largest, finite, strict=True) if not good), None)


def replace_by_masters(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Put the float32 weights that DeepSpeed's optimizer updates in the place of their 16-bit copies in ``state_dict``,
    which is filled on the process that writes it alone. To be called by all processes."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            master = safe_get_full_fp32_param(parameter)
            if master is not None and name in state_dict:
                state_dict[name] = master.view(state_dict[name].shape).cpu()


def missing_parameters(model: nn.Module, missing_keys: list[str]) -> list[str]:
    """Return the parameters of ``model`` that no key was loaded into, under any of the names that they are tied to."""
    missing, loaded = {}, set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in missing_keys:
            missing.setdefault(id(parameter), name)
        else:
            loaded.add(id(parameter))
    return [name for key, name in missing.items() if key not in loaded]


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators of this process."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put the global random generators back to what [`random_states`] returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the global random generators at the end of this context."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


def _state_file(checkpoint: str, rank: int) -> Path:
    return Path(checkpoint) / f"mxfp4_state_{rank}.pt"
