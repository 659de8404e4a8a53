# SPDX-License-Identifier: Apache-2.0
"""What the processes of the kill trials and of the tests of dead ranks do."""

import os
import shutil
import signal
from pathlib import Path

import torch
from cpu_engines import use_engine
from engine_jobs import grpo_trainer, make_base  # noqa: F401  run by name
from grpo_runs import even_digits
from transformers import TrainerState

from hf_mxfp4.checkpoint import last_complete_checkpoint
from hf_mxfp4.rl.rewards import guard_reward


STEPS = 4
OPTIONS = {"max_steps": STEPS, "save_steps": 1, "save_total_limit": 2, "num_iterations": 2, "logging_steps": 2}


def train_or_resume(base: str, run: str, dies_writing: str | None = None) -> None:
    """Train to the end, from the newest complete checkpoint if there is one; leave the final state in ``final.pt``.

    ``dies_writing``: a file of the third checkpoint that is begun, or ``"rotation"``; the process writes half of it, or
    deletes half of the oldest checkpoint, and gets SIGKILL.
    """
    if dies_writing is not None:
        _die_while_writing(dies_writing)
    folder = Path(run)
    trainer = grpo_trainer(base, "qat", folder, **OPTIONS)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder) is not None)
    state = {"weights": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    state["random"] = torch.get_rng_state()
    torch.save(state, folder / "final.partial")
    os.replace(folder / "final.partial", folder / "final.pt")


def _die_while_writing(name: str) -> None:
    begun = []

    def half(original, position):
        def write(*args, **kwargs):
            original(*args, **kwargs)
            path = Path(args[position])
            if path.name == name and path.parent.name.startswith("checkpoint-"):
                begun.append(path)
                if len(begun) == 3:
                    os.truncate(path, path.stat().st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)

        return write

    def half_removed(path, **kwargs):
        if Path(path).name.startswith("checkpoint-"):
            for file in sorted(Path(path).iterdir())[::2]:
                file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        original_rmtree(path, **kwargs)

    torch.save = half(torch.save, 1)
    TrainerState.save_to_json = half(TrainerState.save_to_json, 1)
    if name == "rotation":
        original_rmtree, shutil.rmtree = shutil.rmtree, half_removed


def train_with_a_failing_rank(base: str, run: str, failure: str | None) -> None:
    """Two ranks, a checkpoint at each step; in the third rollout rank 1 is ``"killed"``, or its reward function
    ``"raises"``. They go on from the newest whole checkpoint, if there is one. Rank 0 leaves the final state, and
    the steps that it made, in ``final.pt``."""
    folder, steps = Path(run), []
    use_engine("ddp", folder)
    torch.set_num_threads(1)
    trainer = grpo_trainer(base, "qat", folder, save_steps=1)

    def reward(completions, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        if failure and trainer_state.global_step == 2 and os.environ["RANK"] == "1":
            print(f"rank 1 fails now: {failure}", flush=True)
            if failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("answer")
        return even_digits(completions)

    reward.__name__ = even_digits.__name__
    trainer.reward_funcs = [guard_reward(reward)]
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder) is not None)
    if os.environ["RANK"] == "0":
        state = {"weights": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        torch.save(state | {"steps": steps}, folder / "final.pt")
    torch.distributed.barrier()
