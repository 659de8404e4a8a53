# SPDX-License-Identifier: Apache-2.0
"""GRPO on a quantized policy, from a checkpoint to a trained, saved and reloaded one.

    accelerate launch recipes/grpo.py --config recipes/configs/<name>.yaml [--option value ...]

In order: prepare the model (and distil it, with `distill_steps`), evaluate, train, evaluate, save, pack, and reload;
`train.py` is the short way to it for a model and problems of your own. Without `--config` it runs `tiny_cpu.yaml`,
unless another model or task is named. Every option of the recipe, of `MXFP4RLConfig`, of `MXFP4GRPOConfig` and of TRL's
`ModelConfig` can stand in the YAML file or on the command line. The command line wins, and a preset or mode there
resets what the file says of the scheme. A model that is an adapter is trained further; `max_steps: 0` evaluates alone.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  the root in place of this folder

import sys
import time
from pathlib import Path
from typing import Any

from hf_mxfp4 import MXFP4GRPOTrainer
from hf_mxfp4.files import write_json
from hf_mxfp4.recipes.common.reporting import errors_as_messages, shutdown, tell
from hf_mxfp4.recipes.evaluation.generate import end_with_line
from hf_mxfp4.recipes.post_training import output as files
from hf_mxfp4.recipes.post_training.arguments import Options, parse_or_exit
from hf_mxfp4.recipes.post_training.distillation import distil
from hf_mxfp4.recipes.post_training.evaluation import EvaluationCallback, PolicyEvaluation
from hf_mxfp4.recipes.post_training.packing import pack_policy, print_commands
from hf_mxfp4.recipes.post_training.policy import (
    find_start,
    load_policy,
    load_saved,
    load_task,
    make_trainer,
    prepare_start,
    usual_learning_rate,
)
from hf_mxfp4.recipes.post_training.shared_prompts import SharedPromptTrainer


def main(argv: list[str]) -> dict[str, Any]:
    """Run the recipe; return the summary that it also writes to `summary.json` in the output folder."""
    started = time.monotonic()
    options = parse_or_exit(argv)
    with files.one_run(options) as output:
        return run(options, output, started)


def run(options: Options, output: Path, started: float) -> dict[str, Any]:
    """Run the recipe in its output folder, which is locked; see [`main`]."""
    # The start: a checkpoint, smoothed and rounded as the options say, and distilled.
    stored, options = find_start(options)
    task = load_task(options, stored)
    if task.is_one_line and options.training.use_vllm:
        raise SystemExit(f"error: completions of the task {task.name!r} end with their line, which use_vllm cannot do")
    start = prepare_start(stored, options, task, output)
    distilled = None
    if options.recipe.distill_steps:
        with errors_as_messages(ValueError):
            start, distilled = distil(start, task, options.recipe.distill_steps)

    # The policy and its trainer.
    stored = start.stored
    options = start.options
    recipe = options.recipe
    study = options.recipe.study
    training = options.training
    policy, tokenizer = load_policy(stored, options)
    if training.max_completion_length is None:
        training.max_completion_length = task.max_completion_length
    if task.is_one_line:
        with errors_as_messages(ValueError):
            tell("completions", f"end with their line, at any of {end_with_line(policy, tokenizer)} tokens")
    if training.max_steps and "learning_rate" not in recipe.named:
        with errors_as_messages(ValueError):
            training.learning_rate = usual_learning_rate(policy, options)
        tell("learning rate", f"{training.learning_rate:g}, as usual for weights of this size; no option names one")
    if recipe.full_precision:
        training.allow_full_precision = True
    kind = MXFP4GRPOTrainer
    if study.share_prompts:
        kind = SharedPromptTrainer
    trainer = make_trainer(
        kind,
        policy,
        stored,
        options,
        reward_funcs=task.reward_funcs,
        train_dataset=task.train,
        processing_class=tokenizer,
    )
    evaluate = PolicyEvaluation(trainer, task, recipe)
    if recipe.evaluate_every:
        trainer.add_callback(EvaluationCallback(evaluate))
    report = files.begin(trainer, options, output)

    # Evaluate, train, evaluate.
    before = evaluate.before_training() if study.evaluate_before else None
    evaluate.report("before RL", before)
    if training.max_steps:
        with report.on_exit(trainer):
            trainer.train(resume_from_checkpoint=files.resume_choice(training))
    after = before
    if training.max_steps or before is None:
        after = evaluate("evaluating after RL")
    evaluate.report("after RL", after)

    # Save, pack, and write the results.
    saved = output / "policy" if study.save_policy else None
    if saved is not None:
        trainer.save_model(str(saved))
    trainer.accelerator.wait_for_everyone()
    summary: dict[str, Any] = {}
    if trainer.is_world_process_zero():
        origin = start.origin
        if study.rollout_scheme:
            origin += f", sampled under {study.rollout_scheme}"
        summary = files.write_results(output, trainer, report, task, before, after, saved, origin)
        summary["distilled"] = distilled
        if saved is not None and study.pack:
            summary |= pack_policy(saved, start, summary)
    trainer.accelerator.wait_for_everyone()

    # Load the saved policy again. Last, when all results are written: a second model beside the states of training may
    # not fit into memory. All processes take part.
    try:
        if saved is not None and study.reload_check:
            reloaded = evaluate.compare_reloaded(saved, lambda: load_saved(saved, stored, options), after)
            if summary:
                summary["reloaded"] = reloaded
    except BaseException:
        tell("reloading failed", "all results are written; --study '{reload_check: 0}' leaves it out")
        raise
    finally:
        if summary:
            summary["seconds"] = round(time.monotonic() - started, 1)
            write_json(output / "summary.json", summary, indent=2)
            files.print_summary(summary)
            print_commands(summary, recipe)
    trainer.accelerator.wait_for_everyone()
    return summary


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
