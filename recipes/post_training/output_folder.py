# SPDX-License-Identifier: Apache-2.0
"""Which run the files of an output folder belong to: a new one, the one that is resumed, or one to be written over."""

import shutil
from pathlib import Path

from accelerate import PartialState

from hf_mxfp4 import MXFP4GRPOConfig
from hf_mxfp4.checkpoint import checkpoint_step, invalidate, last_complete_checkpoint
from recipes.post_training.arguments import RecipeArguments


def resume_choice(training: MXFP4GRPOConfig) -> str | bool | None:
    """What `Trainer.train` takes: a folder, True for the newest checkpoint, or None. YAML has booleans, the command
    line their names."""
    choice = training.resume_from_checkpoint
    words = {"": None, "none": None, "false": None, "true": True}
    return words.get(str(choice).lower(), choice)


def refuse_used_folder(output: Path, recipe: RecipeArguments, training: MXFP4GRPOConfig) -> None:
    """Exit rather than mix a new run into the folder of an old one. To be called by all processes."""
    resuming = resume_choice(training) is not None
    if resume_choice(training) is True and last_complete_checkpoint(output) is None:
        raise SystemExit(
            f"error: nothing to resume: {output} holds no complete checkpoint (see save_strategy and save_steps)"
        )
    if output.is_dir() and any(output.iterdir()) and not (recipe.overwrite or resuming):
        raise SystemExit(
            f"error: output_dir {output} is not empty; choose another --output_dir, continue with "
            "--resume_from_checkpoint true, or write over it with --overwrite true"
        )
    # No process may write there before the last one has looked.
    PartialState().wait_for_everyone()
    output.mkdir(parents=True, exist_ok=True)


def remove_old_checkpoints(output: Path, recipe: RecipeArguments, training: MXFP4GRPOConfig) -> None:
    """Remove the checkpoints of the run that is written over: a later `--resume_from_checkpoint true` would take the
    one with the largest step, be it an old one. To be called by all processes, when nothing can be refused any more."""
    if recipe.overwrite and resume_choice(training) is None and PartialState().is_main_process:
        for folder in [path for path in output.iterdir() if checkpoint_step(path) is not None and path.is_dir()]:
            if folder.is_symlink():
                folder.unlink()
                continue
            # First what makes it count as whole: should removing it be cut short, nobody resumes from the rest.
            invalidate(folder)
            shutil.rmtree(folder)
    # No process may write a checkpoint of its own before.
    PartialState().wait_for_everyone()
