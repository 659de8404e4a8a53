# SPDX-License-Identifier: Apache-2.0
"""Distillation before RL: the policy learns the predictions of its checkpoint in full precision."""

import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from hf_mxfp4 import MXFP4DistillationConfig, MXFP4DistillationTrainer
from hf_mxfp4.files import write_json
from hf_mxfp4.recipes.common.checkpoints import read_stored
from hf_mxfp4.recipes.common.reporting import TrainingBar, tell
from hf_mxfp4.recipes.post_training.output import resume_choice
from hf_mxfp4.recipes.post_training.policy import Start, load_policy, make_trainer, usual_learning_rate
from hf_mxfp4.recipes.tasks import Task, of_task


#: Rows of a step, and held-out rows that the divergence is measured on.
_ROWS = 8
_HELD_OUT = 24
#: Times the usual learning rate of RL: 1e-4 for SmolLM2-135M (docs/distillation.md).
_FASTER = 10.0
#: Options of the run that are also those of distillation.
_SHARED = ("seed", "use_cpu", "bf16", "fp16", "gradient_checkpointing", "dataloader_pin_memory", "trust_remote_code")


def distil(start: Start, task: Task, steps: int) -> tuple[Start, dict[str, Any]]:
    """Distil the policy for some ``steps`` on the training problems of a task, and save it in the folder `distilled` of
    the run. A run that is resumed finds it there. All processes call it.

    Returns the start of RL, and what was measured: the divergence from the teacher on held-out problems (nats a token)
    before and after. Raises `ValueError` where there is no checkpoint in full precision to learn from.
    """
    stored = start.stored
    options = start.options
    if options.recipe.full_precision:
        raise ValueError("distill_steps is for quantized policies, and full_precision leaves this one as it is")
    if stored.quantization is not None or stored.adapter is not None:
        raise ValueError(f"distill_steps starts in full precision; {stored.source} is quantized or an adapter")
    folder = Path(options.training.output_dir, "distilled")
    record = folder / "distillation.json"
    if resume_choice(options.training) is None or not record.is_file():
        measured = _train(start, task, steps, folder)
        if PartialState().is_main_process:
            write_json(record, measured)
        gc.collect()  # student and teacher
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        PartialState().wait_for_everyone()
    done = json.loads(record.read_text())
    told = (
        "{steps} steps towards {teacher}: held-out KL {kl_before:.4f} -> {kl_after:.4f} nats a token, {seconds:.0f} s"
    )
    tell("distilled", told.format(**done))
    origin = f"{start.origin}, distilled for {done['steps']} steps"
    return start._replace(stored=read_stored(str(folder)), origin=origin), done


def _train(start: Start, task: Task, steps: int, folder: Path) -> dict[str, Any]:
    """Train and save the student; return what was measured."""
    began = time.monotonic()
    options = start.options
    policy, tokenizer = load_policy(start.stored, options)
    tokenizer.split_special_tokens = False  # TRL ends texts by the name of a token
    training = MXFP4DistillationConfig(
        output_dir=str(folder),
        teacher_model_name_or_path=start.original,
        teacher_model_revision=options.model.model_revision,
        max_steps=steps,
        per_device_train_batch_size=_ROWS,
        per_device_eval_batch_size=_ROWS,
        learning_rate=_FASTER * usual_learning_rate(policy, options),
        lr_scheduler_type="cosine",
        warmup_steps=min(5, steps // 2),
        logging_steps=max(1, steps // 20),
        save_strategy="no",
        report_every=0,
        report_to="none",
        **{name: getattr(options.training, name) for name in _SHARED},
    )
    test = task.test.select(range(min(_HELD_OUT, len(task.test))))
    trainer = make_trainer(
        MXFP4DistillationTrainer,
        policy,
        start.stored,
        options._replace(training=training),
        train_dataset=of_task(task.train, "text"),
        eval_dataset=of_task(test, "text"),
        processing_class=tokenizer,
    )
    TrainingBar.install(trainer)
    before = trainer.evaluate()["eval_kl"]
    trainer.train()
    after = trainer.evaluate()["eval_kl"]
    trainer.save_model(str(folder))
    return {
        "steps": steps,
        "teacher": start.original,
        "learning_rate": training.learning_rate,
        "tokens": trainer.tokens_distilled,
        "kl_before": before,
        "kl_after": after,
        "seconds": round(time.monotonic() - began, 1),
    }
