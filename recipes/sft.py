# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of a quantized model by TRL's `SFTTrainer`, all weights or adapters.

    accelerate launch recipes/sft.py --config recipes/configs/<name>.yaml [--option value ...]

Without `--config` it runs `sft_tiny_cpu.yaml`, unless another model or task is named. Every option of the recipe, of
`MXFP4RLConfig`, of `SFTConfig` and of `ModelConfig` can stand in the YAML file or on the command line, which wins.
Held-out texts are evaluated before, while and after it trains; `max_steps: 0` evaluates alone. A run that was stopped
continues by `--resume_from_checkpoint true` as if it had not been.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  the root in place of this folder

import sys
from typing import Any

from trl import SFTConfig, SFTTrainer

from hf_mxfp4.recipes.common.options import CONFIGS
from hf_mxfp4.recipes.common.reporting import shutdown, tell
from hf_mxfp4.recipes.post_training.arguments import TextArguments, groups_of
from hf_mxfp4.recipes.post_training.texts import TextRun
from hf_mxfp4.rl import ExactResumeMixin
from hf_mxfp4.rl.config import count_quantized


#: Run without `--config`.
DEMO = CONFIGS / "sft_tiny_cpu.yaml"
GROUPS = groups_of(SFTConfig, TextArguments)
#: Values of the option `learn`.
LEARN = ("text", "completion")
#: What is reported of each held-out text, and its heading in the table.
MEASURES = {"loss": "loss"}


class Trainer(ExactResumeMixin, SFTTrainer):
    """TRL's trainer. A run that was stopped continues as if it had not been."""


def main(argv: list[str]) -> dict[str, Any]:
    """Run the recipe; return the summary that it also writes to `summary.json` in the output folder."""
    with TextRun.begun(argv, GROUPS, DEMO, LEARN) as run:
        facts = {"model": run.origin, "n_quantized": count_quantized(run.policy)}
        trainer = run.make_trainer(Trainer)
        tell("model", f"{run.origin}: {facts['n_quantized']} quantized layers")
        return run.train(trainer, MEASURES, lambda: facts, saved_as="policy")


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
