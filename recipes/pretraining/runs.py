# SPDX-License-Identifier: Apache-2.0
"""One run of a study: an arm and a seed, from the seed's initial weights to a loss curve."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_mxfp4.layers import random_layers
from hf_mxfp4.rl import OscillationResetCallback, QuantizationStepCallback
from recipes.common.progress import TrainingBar
from recipes.tasks.tiny_model import build_qwen2

from .arguments import Study
from .arms import Arm, quantized_operands
from .corpus import Corpus


class StopOnDivergence(TrainerCallback):
    """Ends a run whose validation loss is no longer finite."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if not math.isfinite((metrics or {}).get("eval_loss", 0.0)):
            control.should_training_stop = True


def initial_model(study: Study, corpus: Corpus, seed: int, folder: Path) -> Path:
    """A folder with the full-precision model that all arms of a seed start from."""
    if PartialState().is_main_process and not (folder / "config.json").is_file():
        options = study.options
        model = build_qwen2(
            corpus.tokenizer,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            intermediate_size=options.intermediate_size,
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            max_positions=options.sequence_length,
            tie_word_embeddings=options.tie_word_embeddings,
            initializer_range=options.initializer_range,
            seed=seed,
        )
        model.save_pretrained(folder)
    PartialState().wait_for_everyone()
    return folder


def train_arm(study: Study, arm: Arm, seed: int, corpus: Corpus, output: Path) -> dict[str, Any]:
    """Train one arm with one seed.

    Args:
        study, corpus: whose options and text.
        arm, seed: which run.
        output: folder of the study; initial weights and checkpoints, if any, are kept there.

    Returns:
        The run, JSON: the curve as ``[tokens, validation loss]`` (`None` for a loss that is not finite), what was
        quantized, and times.

    Raises `ValueError` when the arm should quantize and no operand is.
    """
    start = initial_model(study, corpus, seed, output / f"initial-seed{seed}")
    model = AutoModelForCausalLM.from_pretrained(start, dtype="float32", quantization_config=arm.seeded(seed))
    report = getattr(model, "quantization_report", None)
    operands = quantized_operands(model)
    if arm.config is not None and not any(operands.values()):
        raise ValueError(f"arm {arm.name} quantizes no operand of any layer")
    training = _training_arguments(study, arm, seed, output)
    dataset, order = corpus.ordered(seed, study.sequences_per_step)
    callbacks = _callbacks(study, arm, model)
    trainer = Trainer(
        model,
        training,
        train_dataset=dataset,
        eval_dataset=corpus.validation,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    TrainingBar.install(trainer, title=f"{arm.name}, seed {seed}", shown={"eval_loss": "validation", "loss": "loss"})
    started, used = time.monotonic(), time.process_time()
    checkpoint = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds, used = time.monotonic() - started, time.process_time() - used
    history = trainer.state.log_history
    steps = trainer.state.global_step
    resets = [callback for callback in callbacks if isinstance(callback, OscillationResetCallback)]
    return {
        "arm": arm.name,
        "seed": seed,
        "scheme": study.scheme_text(arm),
        "config": None if arm.config is None else arm.config.to_dict(),
        "precision": study.precision,
        "parameters": model.num_parameters(),
        "n_quantized": 0 if report is None else report.n_quantized,
        "n_skipped": 0 if report is None else report.n_skipped,
        "quantized_operands": operands,
        "data_order": order,
        "entropy": corpus.entropy,
        "steps": steps,
        "curve": _curve(history, "eval_loss", study.tokens_per_step),
        "training_loss": _curve(history, "loss", study.tokens_per_step),
        "oscillation_resets": resets[0].history if resets else None,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
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


def _callbacks(study: Study, arm: Arm, model: PreTrainedModel) -> list[TrainerCallback]:
    callbacks: list[TrainerCallback] = [StopOnDivergence()]
    if random_layers(model):
        callbacks.append(QuantizationStepCallback())
    if arm.resets:
        options = study.options
        callbacks.append(
            OscillationResetCallback(
                start=round(options.oscireset_start * study.training.max_steps),
                period=options.oscireset_period,
                window=options.oscireset_window,
                ratio=options.oscireset_ratio,
            )
        )
    return callbacks


def _curve(history: list[dict], key: str, tokens_per_step: int) -> list[list]:
    # A resumed run evaluates again at the step that it resumes at.
    found = {entry["step"] * tokens_per_step: entry[key] for entry in history if key in entry}
    return [[tokens, value if math.isfinite(value) else None] for tokens, value in found.items()]
