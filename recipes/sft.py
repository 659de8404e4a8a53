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
import time
from pathlib import Path
from typing import Any

from trl import SFTConfig, SFTTrainer, get_peft_config

from hf_mxfp4.recipes.common.options import CONFIGS
from hf_mxfp4.recipes.common.reporting import INPUT_ERRORS, errors_as_messages, shutdown, tell
from hf_mxfp4.recipes.post_training.arguments import SFTArguments, parse_or_exit
from hf_mxfp4.recipes.post_training.policy import load_policy, prepare_start
from hf_mxfp4.recipes.post_training.texts import check_output_and_task, load_datasets, train_on_texts
from hf_mxfp4.rl import ExactResumeMixin
from hf_mxfp4.rl.config import count_quantized


DEMO = CONFIGS / "sft_tiny_cpu.yaml"
LEARN = ("text", "completion")
#: What is reported of each held-out text, and its heading in the table.
MEASURES = {"loss": "loss"}


class Trainer(ExactResumeMixin, SFTTrainer):
    """TRL's, whose stopped runs continue exactly."""


def main(argv: list[str]) -> dict[str, Any]:
    """Run the recipe; return the summary that it also writes to `summary.json` in the output folder."""
    started = time.monotonic()
    options = parse_or_exit(argv, SFTConfig, SFTArguments, DEMO)
    recipe, _, training, model_args = options
    output = Path(training.output_dir)
    task = check_output_and_task(options, output, LEARN)
    start, options, origin = prepare_start(options, task, output)
    policy, tokenizer = load_policy(start, options)
    tokenizer.split_special_tokens = False  # TRL ends texts by the name of a token
    n_quantized = count_quantized(policy)
    with errors_as_messages(*INPUT_ERRORS):
        learned, held_out = load_datasets(options, task, tokenizer)
        trainer = Trainer(
            policy,
            training,
            train_dataset=learned,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=None if start.is_adapter else get_peft_config(model_args),
        )
    tell("model", f"{origin}: {n_quantized} quantized layers")

    def facts() -> dict[str, Any]:
        return {"model": origin, "n_quantized": n_quantized}

    saved = output / "policy" if recipe.save_policy else None
    return train_on_texts(trainer, options, output, saved, MEASURES, facts, started)


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
