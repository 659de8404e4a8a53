# SPDX-License-Identifier: Apache-2.0
"""GRPO on a quantized policy, from a checkpoint to a trained, saved and reloaded one.

    accelerate launch recipes/grpo.py --config recipes/configs/<name>.yaml [--option value ...]

Without `--config` it runs `tiny_cpu.yaml`. Every option of the recipe, of `MXFP4RLConfig`, of `MXFP4GRPOConfig` and of
TRL's `ModelConfig` can stand in the YAML file or on the command line, which wins.
"""

import functools
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from accelerate import PartialState
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from trl import ModelConfig, get_peft_config

from common.arguments import RecipeArguments, exit_on_wrong_options, parse
from common.checksum import frozen_checksum
from common.evaluation_callback import GreedyEvaluation
from common.output_folder import refuse_used_folder, remove_old_checkpoints, resume_choice
from common.placement import placed, why_not_on
from common.process_group import leave_together
from common.progress import TrainingBar
from common.resolved_config import FILE_NAME, write_resolved_config
from common.run_summary import print_summary, write_results, write_summary
from common.terminal import console, tell
from evaluation.generate import Evaluation, evaluate_greedy
from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig
from hf_mxfp4.rl.callbacks.policy import thresholds_kept
from tasks import Task, build_tokenizer, load_task
from tasks.tiny_model import TINY_MODELS, supervised_warmup


# TRL's own default still has the old name of this option.
warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing.*")


def main(argv: list[str]) -> dict:
    """Run the recipe; the summary that it also writes to `summary.json` in the output folder."""
    started = time.monotonic()
    recipe, quantization, training, model_args = parse_or_exit(argv)
    output = Path(training.output_dir)
    refuse_used_folder(output, recipe, training)
    task = load_task_or_exit(recipe)
    training.max_completion_length = training.max_completion_length or task.max_completion_length
    exit_on_wrong_lengths(training)
    tell("task", f"{task.name}: {len(task.train)} training and {len(task.test)} test problems")
    tell("scheme", "full precision" if recipe.full_precision else quantization.describe())

    source = origin = model_args.model_name_or_path
    if source is None:
        source = str(make_base_model(recipe, training, task, output / "base"))
        origin = (
            f"{recipe.tiny_architecture} made on the spot ({recipe.tiny_num_layers} layers, width "
            f"{recipe.tiny_hidden_size})"
        )
    policy, tokenizer = load_policy(source, recipe, quantization, training, model_args)
    training.allow_full_precision = training.allow_full_precision or recipe.full_precision
    trainer = MXFP4GRPOTrainer(
        policy,
        task.reward_funcs,
        training,
        task.train,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    TrainingBar.install(trainer)
    # Not earlier: a start that fails is to leave an empty folder, which can be used again, or what the old run left.
    remove_old_checkpoints(output, recipe, training)
    if PartialState().is_main_process:
        run = write_resolved_config(output, recipe, quantization, training, model_args)
        tell("options", f"all of them in {output / FILE_NAME} (run {run})")

    def evaluate(title: str, most: int | None = None) -> Evaluation:
        model = trainer.accelerator.unwrap_model(trainer.model)
        # In the precision of training, which a model has in itself only once it is trained; and leaving training alone.
        with trainer.accelerator.autocast(), thresholds_kept(model):
            return evaluate_greedy(
                model,
                tokenizer,
                task.test.select(range(min(most or len(task.test), len(task.test)))),
                task.scores,
                max_new_tokens=training.max_completion_length,
                batch_size=recipe.greedy_batch_size,
                title=title,
                cache_weights=training.cache_rollout_weights,
            )

    if recipe.evaluate_every:
        during = functools.partial(evaluate, "evaluating", recipe.evaluate_every_n)
        log = functools.partial(Trainer.log, trainer)
        trainer.add_callback(GreedyEvaluation(recipe.evaluate_every, during, log))

    def checksum() -> str | None:
        return frozen_checksum(trainer.accelerator.unwrap_model(trainer.model)) if model_args.use_peft else None

    base_before = checksum()
    before = None
    if recipe.evaluate_before:
        model = trainer.accelerator.unwrap_model(trainer.model)
        reason = why_not_on(training.device, model, copies=training.cache_rollout_weights and trainer.n_quantized > 0)
        if reason is not None:
            tell("not evaluated before RL:", reason)
        else:
            with placed(model, training.device):
                before = evaluate("evaluating before RL")
    add_to_report(trainer, "before RL", 0, before)
    trainer.train(resume_from_checkpoint=resume_choice(training))
    after = evaluate("evaluating after RL")
    add_to_report(trainer, "after RL", trainer.state.global_step, after)
    base_after = checksum()

    saved = output / "policy" if recipe.save_policy else None
    if saved is not None:
        trainer.save_model(str(saved))
    trainer.accelerator.wait_for_everyone()

    summary: dict = {}
    if trainer.is_world_process_zero():
        checksums = base_before and {"before": base_before, "after": base_after}
        seconds = round(time.monotonic() - started, 1)
        summary = write_results(output, trainer, task, before, after, saved, origin, checksums, seconds)
    # Only now, and when nobody writes any more: a second model beside the states of training may not fit into memory.
    trainer.accelerator.wait_for_everyone()

    def load_saved() -> PreTrainedModel:
        if not model_args.use_peft:
            return AutoModelForCausalLM.from_pretrained(
                saved,
                attn_implementation=model_args.attn_implementation,
                trust_remote_code=training.trust_remote_code,
            )
        base, _ = load_policy(source, recipe, quantization, training, model_args)
        return PeftModel.from_pretrained(base, saved)

    found: dict = {}
    try:
        # All processes take part: the evaluation is shared between them.
        autocast = trainer.accelerator.autocast
        found["reloaded"] = saved and reload_and_compare(saved, load_saved, recipe, task, training, autocast, after)
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


# ---- inputs, with messages for what is missing ----------------------------------------------------------------------


def parse_or_exit(argv: list[str]) -> tuple[RecipeArguments, MXFP4RLConfig, MXFP4GRPOConfig, ModelConfig]:
    """Parsed arguments; a message instead of a traceback for wrong options and for a missing GPU."""
    return exit_on_wrong_options(
        parse,
        argv,
        "Run it on a GPU machine, or on the CPU with --use_cpu true (and a model small enough for it); without "
        "--config a small model trains there.",
    )


def exit_on_wrong_lengths(training: MXFP4GRPOConfig) -> None:
    """A message about lengths that do not fit together, of which the task may have set one; before a model is made."""
    try:
        training.check_overlong_buffer()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


def load_task_or_exit(recipe: RecipeArguments) -> Task:
    """The task, or a message about the data that is missing or malformed."""
    try:
        return load_task(
            recipe.task,
            train_file=recipe.train_file,
            test_file=recipe.test_file,
            dataset_name=recipe.dataset_name,
            dataset_config=recipe.dataset_config,
            seed=recipe.data_seed_split,
            n_train=recipe.n_train,
            n_test=recipe.n_test,
            prompt_template=recipe.prompt_template,
            conversational=recipe.conversational,
            problem_count=recipe.problem_count,
            problem_steps=recipe.problem_steps,
        )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


def make_base_model(recipe: RecipeArguments, training: MXFP4GRPOConfig, task: Task, folder: Path) -> Path:
    """Build, warm up and save a small full-precision model and its tokenizer; an existing one is reused on resume."""
    if resume_choice(training) is not None and (folder / "config.json").is_file():
        return folder
    if PartialState().is_main_process:
        tokenizer = build_tokenizer(task.name)
        model = TINY_MODELS[recipe.tiny_architecture](
            tokenizer,
            hidden_size=recipe.tiny_hidden_size,
            num_layers=recipe.tiny_num_layers,
            intermediate_size=2 * recipe.tiny_hidden_size,
            max_positions=recipe.tiny_max_positions,
            seed=training.seed,
        )
        size = f"{model.num_parameters() / 1e6:.2f} M parameters"
        tell("model", f"{recipe.tiny_architecture} with {size}, made on the spot")
        if recipe.sft_steps:
            supervised_warmup(
                model,
                tokenizer,
                task.train,
                steps=recipe.sft_steps,
                batch_size=recipe.sft_batch_size,
                learning_rate=recipe.sft_learning_rate,
                seed=training.seed,
                target_loss=recipe.sft_target_loss,
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    PartialState().wait_for_everyone()
    return folder


def load_policy(
    source: str,
    recipe: RecipeArguments,
    quantization: MXFP4RLConfig,
    training: MXFP4GRPOConfig,
    model_args: ModelConfig,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy under its scheme, and its tokenizer; a message when the checkpoint is missing or unsuitable."""
    if source.startswith((".", "/", "~")) and not Path(source).is_dir():
        raise SystemExit(f"error: cannot load the model {source!r}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            revision=model_args.model_revision,
            padding_side="left",
            trust_remote_code=training.trust_remote_code,
        )
        policy = AutoModelForCausalLM.from_pretrained(
            source,
            revision=model_args.model_revision,
            dtype=model_args.dtype,
            attn_implementation=model_args.attn_implementation,
            trust_remote_code=training.trust_remote_code,
            quantization_config=None if recipe.full_precision else quantization,
        )
    except OSError as error:
        raise SystemExit(
            f"error: cannot load the model {source!r}: {error}\nGive --model_name_or_path a local folder, or a Hub id "
            "while the Hub is reachable; leave it out to make a small model on the spot."
        ) from error
    except ValueError as error:
        raise SystemExit(f"error: cannot load the model {source!r} under this scheme: {error}") from error
    carried = getattr(policy.config, "quantization_config", None)
    if not recipe.full_precision and carried != quantization:
        raise SystemExit(
            f"error: {source!r} was saved under the scheme {carried.describe()}, not {quantization.describe()}; "
            "give the same options, or remove quantization_config from its config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return policy, tokenizer


# ---- results --------------------------------------------------------------------------------------------------------


def add_to_report(trainer: MXFP4GRPOTrainer, when: str, step: int, evaluation: Evaluation | None) -> None:
    """Put the accuracy by each score into the run report, where there are both."""
    if trainer.report_callback is not None and evaluation is not None:
        scores = {
            name: {
                "accuracy": evaluation.accuracy(name),
                "standard_error": evaluation.standard_error(name),
                "n": len(evaluation.completions),
            }
            for name in evaluation.correct
        }
        trainer.report_callback.add_evaluation(when, step, scores)


def reload_and_compare(
    saved: Path,
    load_saved: Callable[[], PreTrainedModel],
    recipe: RecipeArguments,
    task: Task,
    training: MXFP4GRPOConfig,
    autocast: Callable[[], AbstractContextManager],
    after: Evaluation,
) -> dict | None:
    """Load the saved policy afresh, compare its completions with the trained one's, and print some."""
    if recipe.reload_check == 0:
        return None
    count = min(recipe.reload_check, len(task.test))
    # Whole batches of the evaluation, so that padding is the same and completions can be compared to the letter.
    count = min(-(-count // recipe.greedy_batch_size) * recipe.greedy_batch_size, len(task.test))
    tokenizer = AutoTokenizer.from_pretrained(saved, padding_side="left", trust_remote_code=training.trust_remote_code)
    model = load_saved().to(training.device)
    subset = task.test.select(range(count))
    with autocast():
        evaluation = evaluate_greedy(
            model,
            tokenizer,
            subset,
            task.scores,
            max_new_tokens=training.max_completion_length,
            batch_size=recipe.greedy_batch_size,
            title="reloaded policy",
            cache_weights=training.cache_rollout_weights,
        )
    same = sum(a == b for a, b in zip(evaluation.completions, after.completions, strict=False))
    for i in range(min(recipe.samples_shown, count) if PartialState().is_main_process else 0):
        row = subset[i]
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        console.print(f"  {prompt!r} -> {evaluation.completions[i]!r}  (answer {row['answer']})", markup=False)
    return {"compared": count, "identical": same}


if __name__ == "__main__":
    main(sys.argv[1:])
    leave_together()
