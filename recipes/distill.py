# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware distillation: a quantized student learns the predictions of the checkpoint it was made of.

    accelerate launch recipes/distill.py --config recipes/configs/<name>.yaml [--option value ...]

Without `--config` it runs `distill_tiny_cpu.yaml`, unless another model or task is named. Every option of the recipe,
of `MXFP4RLConfig`, of `MXFP4DistillationConfig` and of `ModelConfig` can stand in the YAML file or on the command
line, which wins. The teacher is the checkpoint in full precision, as it was before smoothing and `gptq` prepare it for
the student; name the original with `teacher_model_name_or_path` when the model is a prepared or packed one.
Held-out texts are evaluated before, while and after it trains; `max_steps: 0` evaluates alone.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  the root in place of this folder

import sys
from typing import Any

from hf_mxfp4 import MXFP4DistillationConfig, MXFP4DistillationTrainer
from hf_mxfp4.recipes.common.options import CONFIGS
from hf_mxfp4.recipes.common.reporting import shutdown, tell
from hf_mxfp4.recipes.post_training.arguments import TextArguments, groups_of
from hf_mxfp4.recipes.post_training.texts import TextRun


DEMO = CONFIGS / "distill_tiny_cpu.yaml"
GROUPS = groups_of(MXFP4DistillationConfig, TextArguments)
LEARN = ("text", "completion", "generated")
#: What is reported of each held-out text, and its heading in the table.
MEASURES = {"kl": "KL", "perplexity": "perplexity", "teacher_perplexity": "of the teacher"}


def main(argv: list[str]) -> dict[str, Any]:
    """Run the recipe; return the summary that it also writes to `summary.json` in the output folder."""
    with TextRun.begun(argv, GROUPS, DEMO, LEARN) as run:
        return _distill(run)


def _distill(run: TextRun) -> dict[str, Any]:
    training = run.options.training
    if run.stored.source != run.original:
        training.teacher_model_name_or_path = training.teacher_model_name_or_path or run.original
    training.allow_full_precision = training.allow_full_precision or run.recipe.full_precision
    trainer = run.make_trainer(MXFP4DistillationTrainer)
    facts = {
        "model": run.origin,
        "teacher": training.teacher_model_name_or_path or run.origin,
        "n_quantized": trainer.n_quantized,
        "shared_tensors": trainer.shared[0],
        "shared_bytes": trainer.shared[1],
    }
    told = "{model}: {n_quantized} quantized layers; {shared_tensors} tensors ({0:.1f} MB) shared"
    tell("student", told.format(trainer.shared[1] / 1e6, **facts))

    def all_facts() -> dict[str, Any]:
        return {**facts, "tokens_distilled": trainer.tokens_distilled}

    return run.train(trainer, MEASURES, all_facts, "student" if run.recipe.study.save_policy else None)


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
