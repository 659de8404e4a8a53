# SPDX-License-Identifier: Apache-2.0
"""GRPO on a quantized policy, from a checkpoint to a trained, saved and reloaded one.

    accelerate launch recipes/grpo.py --config recipes/configs/<name>.yaml [--option value ...]

Without `--config` it runs `tiny_cpu.yaml`, unless another model or task is named. Every option of the recipe, of
`MXFP4RLConfig`, of `MXFP4GRPOConfig` and of TRL's `ModelConfig` can stand in the YAML file or on the command line. The
command line wins, and a preset or mode there resets what the file says of the scheme. A model that is an adapter is
trained further.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  parts are found as recipes.*

import sys
import time
import warnings
from pathlib import Path

from accelerate import PartialState
from trl import get_peft_config

from hf_mxfp4 import MXFP4GRPOTrainer
from hf_mxfp4.lab import RunReportCallback
from recipes.common.process_group import leave_together
from recipes.common.progress import TrainingBar
from recipes.common.schemes import describe
from recipes.common.terminal import tell
from recipes.post_training.arguments import load_task_or_exit, parse_or_exit
from recipes.post_training.checksum import frozen_checksum
from recipes.post_training.evaluation import EvaluationCallback, PolicyEvaluation
from recipes.post_training.output_folder import refuse_used_folder, remove_old_checkpoints, resume_choice
from recipes.post_training.policy import find_start, load_policy, load_saved, prepare_start
from recipes.post_training.resolved_config import FILE_NAME, write_resolved_config
from recipes.post_training.run_summary import print_summary, write_results, write_summary


# TRL's own default still has the old name of this option.
warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing.*")


def main(argv: list[str]) -> dict:
    """Run the recipe; the summary that it also writes to `summary.json` in the output folder."""
    started = time.monotonic()
    options = parse_or_exit(argv)
    recipe, _, training, model_args = options
    output = Path(training.output_dir)
    refuse_used_folder(output, recipe, training)
    task = load_task_or_exit(recipe, training)
    tell("task", f"{task.name}: {len(task.train)} training and {len(task.test)} test problems")
    start = find_start(options)
    options = options._replace(quantization=start.scheme)
    tell("scheme", "full precision" if recipe.full_precision else describe(start.scheme))

    start, origin = prepare_start(start, options, task, output / "base")
    policy, tokenizer = load_policy(start, options)
    training.allow_full_precision = training.allow_full_precision or recipe.full_precision
    trainer = MXFP4GRPOTrainer(
        policy,
        task.reward_funcs,
        training,
        task.train,
        processing_class=tokenizer,
        peft_config=None if start.is_adapter else get_peft_config(model_args),
    )
    TrainingBar.install(trainer)
    # Not earlier: a start that fails is to leave an empty folder, which can be used again, or what the old run left.
    remove_old_checkpoints(output, recipe, training)
    if PartialState().is_main_process:
        run = write_resolved_config(output, *options)
        tell("options", f"all of them in {output / FILE_NAME} (run {run})")

    evaluate = PolicyEvaluation(trainer, task, recipe)
    if recipe.evaluate_every:
        trainer.add_callback(EvaluationCallback(evaluate, recipe.evaluate_every, recipe.evaluate_every_n))
    report = RunReportCallback(training.report_every) if training.report_every else None
    if report is not None:
        trainer.add_callback(report)
    checksums = {"before": frozen_checksum(evaluate.model)} if model_args.use_peft else None
    before = evaluate.before_training() if recipe.evaluate_before else None
    evaluate.report("before RL", before)
    try:
        trainer.train(resume_from_checkpoint=resume_choice(training))
    except BaseException:
        if report is not None and trainer.is_world_process_zero() and trainer.state.log_history:
            report.write(output)
        raise
    after = evaluate("evaluating after RL")
    evaluate.report("after RL", after)
    if checksums is not None:
        checksums["after"] = frozen_checksum(evaluate.model)

    saved = output / "policy" if recipe.save_policy else None
    if saved is not None:
        trainer.save_model(str(saved))
    trainer.accelerator.wait_for_everyone()
    summary: dict = {}
    if trainer.is_world_process_zero():
        seconds = round(time.monotonic() - started, 1)
        if report is not None:
            report.write(output)  # with the evaluation
        written = report and report.path
        summary = write_results(output, trainer, task, before, after, saved, origin, checksums, seconds, written)
    # Only now, and when nobody writes any more: a second model beside the states of training may not fit into memory.
    trainer.accelerator.wait_for_everyone()

    found: dict = {}
    try:
        # All processes take part: the evaluation is shared between them.
        if saved is not None:
            found["reloaded"] = evaluate.compare_reloaded(saved, lambda: load_saved(saved, start, options), after)
    except BaseException as error:
        found["reload_error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if trainer.is_world_process_zero():
            summary |= found | {"seconds": round(time.monotonic() - started, 1)}
            write_summary(output, summary)
            print_summary(summary)
    trainer.accelerator.wait_for_everyone()
    return summary


if __name__ == "__main__":
    main(sys.argv[1:])
    leave_together()
