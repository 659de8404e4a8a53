# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware distillation: a quantized student learns the predictions of the checkpoint it was made of.

    accelerate launch recipes/distill.py --config recipes/configs/<name>.yaml [--option value ...]

Without `--config` it runs `distill_tiny_cpu.yaml`, unless another model or task is named. Every option of the recipe,
of `MXFP4RLConfig`, of `MXFP4DistillationConfig` and of `ModelConfig` can stand in the YAML file or on the command
line, which wins. The teacher is the checkpoint in full precision, as it was before `smooth_strength` and `gptq` prepare
it for the student; name the original with `teacher_model_name_or_path` when the model is a prepared or packed one.
Held-out texts are evaluated before, while and after it trains; `max_steps: 0` evaluates alone.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  the root in place of this folder

import sys
import time
from pathlib import Path
from typing import Any

from trl import get_peft_config

from hf_mxfp4 import MXFP4DistillationConfig, MXFP4DistillationTrainer
from hf_mxfp4.recipes.common.options import CONFIGS
from hf_mxfp4.recipes.common.reporting import INPUT_ERRORS, errors_as_messages, shutdown, tell
from hf_mxfp4.recipes.post_training.arguments import DistillArguments, parse_or_exit
from hf_mxfp4.recipes.post_training.policy import load_policy, prepare_start
from hf_mxfp4.recipes.post_training.texts import check_output_and_task, load_datasets, train_on_texts


DEMO = CONFIGS / "distill_tiny_cpu.yaml"
LEARN = ("text", "completion", "generated")
#: What is reported of each held-out text, and its heading in the table.
MEASURES = {"kl": "KL", "perplexity": "perplexity", "teacher_perplexity": "of the teacher"}


def main(argv: list[str]) -> dict[str, Any]:
    """Run the recipe; return the summary that it also writes to `summary.json` in the output folder."""
    started = time.monotonic()
    options = parse_or_exit(argv, MXFP4DistillationConfig, DistillArguments, DEMO)
    recipe, _, training, model_args = options
    output = Path(training.output_dir)
    task = check_output_and_task(options, output, LEARN)
    start, options, origin = prepare_start(options, task, output)
    if start.name == str(output / "prepared"):
        whole = model_args.model_name_or_path or str(output / "base")
        training.teacher_model_name_or_path = training.teacher_model_name_or_path or whole
    student, tokenizer = load_policy(start, options)
    training.allow_full_precision = training.allow_full_precision or recipe.full_precision
    with errors_as_messages(*INPUT_ERRORS):
        learned, held_out = load_datasets(options, task, tokenizer)
        trainer = MXFP4DistillationTrainer(
            student,
            None,
            training,
            learned,
            held_out,
            processing_class=tokenizer,
            peft_config=None if start.is_adapter else get_peft_config(model_args),
        )
    shared, megabytes = trainer.shared[0], trainer.shared[1] / 1e6
    tell("student", f"{origin}: {trainer.n_quantized} quantized layers; {shared} tensors ({megabytes:.1f} MB) shared")

    def facts() -> dict[str, Any]:
        return {
            "model": origin,
            "teacher": training.teacher_model_name_or_path or origin,
            "n_quantized": trainer.n_quantized,
            "shared_tensors": shared,
            "shared_bytes": trainer.shared[1],
            "tokens_distilled": trainer.tokens_distilled,
        }

    saved = output / "student" if recipe.save_student else None
    return train_on_texts(trainer, options, output, saved, MEASURES, facts, started)


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
