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


#: Run without `--config`.
DEMO = CONFIGS / "distill_tiny_cpu.yaml"
GROUPS = groups_of(MXFP4DistillationConfig, TextArguments)
#: Values of the option `learn`.
LEARN = ("text", "completion", "generated")
#: What is reported of each held-out text, and its heading in the table.
MEASURES = {"kl": "KL", "perplexity": "perplexity", "teacher_perplexity": "of the teacher"}


def main(argv: list[str]) -> dict[str, Any]:
    """Run the recipe; return the summary that it also writes to `summary.json` in the output folder."""
    with TextRun.begun(argv, GROUPS, DEMO, LEARN) as run:
        training = run.options.training
        if training.teacher_model_name_or_path is None and run.stored.source != run.original:
            training.teacher_model_name_or_path = run.original  # the checkpoint as it was before it was prepared
        if run.recipe.full_precision:
            training.allow_full_precision = True
        trainer = run.make_trainer(MXFP4DistillationTrainer)
        n_shared, bytes_shared = trainer.shared
        tell(
            "student",
            f"{run.origin}: {trainer.n_quantized} quantized layers; {n_shared} tensors ({bytes_shared / 1e6:.1f} MB) "
            "shared",
        )

        def facts() -> dict[str, Any]:
            return {
                "model": run.origin,
                "teacher": training.teacher_model_name_or_path or run.origin,
                "n_quantized": trainer.n_quantized,
                "shared_tensors": n_shared,
                "shared_bytes": bytes_shared,
                "tokens_distilled": trainer.tokens_distilled,
            }

        return run.train(trainer, MEASURES, facts, saved_as="student")


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
