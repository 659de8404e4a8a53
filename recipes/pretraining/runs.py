# SPDX-License-Identifier: Apache-2.0
"""The runs of a study: an arm and a seed each, from initial weights to a loss curve; kept in `study.json`."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import atomic_folder, last_complete_checkpoint, stored_scheme
from hf_mxfp4.files import write_json
from hf_mxfp4.layers import random_layers
from hf_mxfp4.recipes.common.checkpoints import differences
from hf_mxfp4.recipes.common.reporting import TrainingBar
from hf_mxfp4.recipes.tasks.tiny_model import build_qwen2
from hf_mxfp4.rl import QuantizationStepCallback

from .arguments import SIZES, Arm, Study, quantized_operands
from .corpus import Corpus


class StudyFile:
    """The finished runs of a study.

    Args:
        path: of the file; runs in one that exists are kept.
        settings: everything that a run's result depends on, but for its arm and seed.

    Raises `ValueError` when the file holds a study with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.runs: list[dict[str, Any]] = []
        if not path.is_file():
            return
        stored = json.loads(path.read_text())
        self.runs = stored["runs"]
        before = stored["settings"]
        changed = [f"{name}={before.get(name)!r}" for name in self.settings if before.get(name) != self.settings[name]]
        if changed:
            raise ValueError(
                f"{path} holds a study with {', '.join(changed)}; choose another output_dir, or the same options"
            )

    def finished(self, arm: Arm, seed: int) -> bool:
        """Return whether there is such a run. Raises `ValueError` when it was of another scheme."""
        for run in self.runs:
            if run["arm"] == arm.name and run["seed"] == seed:
                check_same_scheme(arm, stored_scheme(run["options"]), str(self.path))
                return True
        return False

    def add(self, run: dict[str, Any]) -> None:
        """Append a run."""
        self.runs.append(run)
        self.write()

    def write(self) -> None:
        """Write the file; a process killed meanwhile leaves it as it was."""
        write_json(self.path, {"settings": self.settings, "runs": self.runs}, indent=1)


def check_same_scheme(arm: Arm, stored: MXFP4RLConfig | None, where: str) -> None:
    """Raise `ValueError` unless what is stored of an arm was trained under its scheme."""
    if stored is not None and arm.config is not None and stored != arm.config:
        others = ", ".join(differences(stored, arm.config))
        raise ValueError(f"{where} has a run of arm {arm.name!r} with {others}; give the arm another name")


class StopOnDivergence(TrainerCallback):
    """Ends a run whose validation loss is no longer finite."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if not math.isfinite((metrics or {}).get("eval_loss", 0.0)):
            control.should_training_stop = True


def initial_model(study: Study, corpus: Corpus, seed: int, folder: Path) -> Path:
    """Make the full-precision model that all arms of a seed start from; return its folder."""
    if PartialState().is_main_process and not (folder / "model.safetensors").is_file():
        options = {name: getattr(study.options, name) for name in SIZES}
        model = build_qwen2(corpus.tokenizer, **options, max_positions=study.options.sequence_length, seed=seed)
        with atomic_folder(folder, overwrite=True) as new:
            model.save_pretrained(new)
    PartialState().wait_for_everyone()
    return folder


def train_arm(study: Study, arm: Arm, seed: int, corpus: Corpus, output: Path) -> dict[str, Any]:
    """Train one arm with one seed.

    Initial weights, and checkpoints, if any, are kept in the folder ``output`` of the study. Returns the run, JSON: the
    curve as ``[tokens, validation loss]`` (`None` for a loss that is not finite), what was quantized, and times. Raises
    `ValueError` when the arm should quantize and no operand is.
    """
    training = _training_arguments(study, arm, seed, output)
    checkpoint = last_complete_checkpoint(training.output_dir)
    if checkpoint is not None:
        trained = AutoConfig.from_pretrained(checkpoint)
        stored = stored_scheme(getattr(trained, "quantization_config", None))
        check_same_scheme(replace(arm, config=arm.seeded(seed)), stored, checkpoint)
    start = initial_model(study, corpus, seed, output / f"initial-seed{seed}")
    model = AutoModelForCausalLM.from_pretrained(start, dtype="float32", quantization_config=arm.seeded(seed))
    report = getattr(model, "quantization_report", None)
    operands = quantized_operands(model)
    if arm.config is not None and not any(operands.values()):
        raise ValueError(f"arm {arm.name} quantizes no operand of any layer")
    callbacks: list[TrainerCallback] = [StopOnDivergence()]
    if random_layers(model):
        callbacks.append(QuantizationStepCallback())
    trainer = Trainer(
        model,
        training,
        train_dataset=corpus.ordered(seed, study.sequences_per_step),
        eval_dataset=corpus.validation,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    TrainingBar.install(trainer)
    started = time.monotonic()
    used = time.process_time()
    trainer.train(resume_from_checkpoint=checkpoint)
    return {
        "arm": arm.name,
        "seed": seed,
        "scheme": study.scheme_text(arm),
        "options": arm.config and arm.config.to_dict(),
        "parameters": model.num_parameters(),
        "n_quantized": 0 if report is None else report.n_quantized,
        "n_skipped": 0 if report is None else report.n_skipped,
        "quantized_operands": operands,
        "entropy": corpus.entropy,
        "steps": trainer.state.global_step,
        "curve": _curve(trainer.state.log_history, study.tokens_per_step),
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
    }


def _training_arguments(study: Study, arm: Arm, seed: int, output: Path) -> TrainingArguments:
    return replace(
        study.training,
        output_dir=str(output / "runs" / f"{arm.name}-seed{seed}"),
        seed=seed,
        max_steps=study.total_steps,
        eval_strategy="steps",
        eval_on_start=True,
        # The order is the corpus's. (dataloader_drop_last would shorten the validation set too.)
        train_sampling_strategy="sequential",
        dataloader_drop_last=False,
        # A loss that is not finite is a result, not something to leave out of the mean.
        logging_nan_inf_filter=False,
    )


def _curve(history: list[dict], tokens_per_step: int) -> list[list]:
    # A resumed run evaluates again at the step that it resumes at.
    found = {entry["step"] * tokens_per_step: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    return [[tokens, value if math.isfinite(value) else None] for tokens, value in found.items()]
