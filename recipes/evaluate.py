# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a policy under its own quantization scheme: greedy and sampled, with confidence intervals.

    python recipes/evaluate.py MODEL --task gsm8k [--samples 16 --k 1,4,16] [--dequantize] [--compare RESULT.json]

`docs/evaluation.md` has the options and what they mean.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  `evaluate` is the library

import contextlib
import inspect
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from hf_mxfp4.files import write_json
from hf_mxfp4.lab.resume_log import ResumeLog
from hf_mxfp4.recipes.common.options import exit_on_wrong_options
from hf_mxfp4.recipes.common.reporting import (
    INPUT_ERRORS,
    console,
    errors_as_messages,
    full_disk_as_message,
    shutdown,
    tell,
)
from hf_mxfp4.recipes.evaluation import results
from hf_mxfp4.recipes.evaluation.arguments import EvaluationArguments, parse
from hf_mxfp4.recipes.evaluation.generate import Batch, Completion, complete_batches, end_with_line, tokenize
from hf_mxfp4.recipes.evaluation.policy import Policy, load_policy, read_tokenizer
from hf_mxfp4.recipes.tasks import Task
from hf_mxfp4.utils import installed_version, package_versions


def main(argv: list[str]) -> dict[str, Any]:
    """Evaluate, or compare two results; return the result that is also written, or the differences."""
    options = exit_on_wrong_options(parse, argv)
    if options.model.endswith(".json"):
        return {"differences": _compare_files(options)}
    started = time.monotonic()
    state = PartialState(cpu=options.use_cpu)
    with errors_as_messages(*INPUT_ERRORS):
        tokenizer = read_tokenizer(options)
        task = options.load_task(tokenizer, test_only=True)
        other = None
        if options.compare is not None:
            other = results.read_result(options.compare)
        policy = load_policy(options, state.device)
        if task.is_one_line:
            end_with_line(policy.model, policy.tokenizer)
        options.max_new_tokens = options.max_new_tokens or task.max_completion_length
        token_ids = _token_ids(policy, list(task.test["prompt"]), options)
        keys = results.problem_keys(task.test["prompt"], task.test["answer"])
        if other is not None:
            results.check_same_problems(keys, task.name, other)
        folder = _default_folder(options)
        if options.output_dir:
            folder = Path(options.output_dir)
        logs = {}
        if state.is_main_process:
            logs = _open_logs(options, policy, task, token_ids, folder)
    about = policy.description
    tell("scheme", about["computed_in"])
    tell("layers", f"n_quantized={about['n_quantized']} n_skipped={about['n_skipped']}")
    conversational = not isinstance(task.test["prompt"][0], str)
    form = "chat messages, by the tokenizer's template" if conversational else "plain text"
    tell("prompts", form)

    batches = _plan([len(ids) for ids in token_ids], options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(full_disk_as_message(folder, "the same command"))
        for log in logs.values():
            stack.enter_context(log)
        generated = _complete(policy, task, batches, logs, options)
    if not state.is_main_process:
        return {}
    completions = [Completion(**line) for log in logs.values() for line in log.done.values()]
    generation = {"conversational": conversational}
    for name in ("max_new_tokens", "chat_template_kwargs", "samples", "temperature", "seed", "batch_size"):
        generation[name] = getattr(options, name)
    result = {
        "task": task.name,
        **about,
        **results.summarize(completions, keys, list(task.scores), options),
        "generation": generation,
        "identity": policy.identity,
        "versions": {**package_versions(), "math-verify": installed_version("math-verify")},
        "device": str(state.device),
        "processes": state.num_processes,
        "generated": generated,
        "seconds": round(time.monotonic() - started, 1),
    }
    if other is not None:
        result["compared_with"] = str(options.compare)
        result["differences"] = results.compare(result, other)
    write_json(folder / results.RESULT_FILE, result, indent=1, ensure_ascii=False)
    results.show(result)
    if other is not None:
        results.show_differences(result["differences"], result, other)
    console.print(f"written to {folder / results.RESULT_FILE}", highlight=False, markup=False)
    return result


def _compare_files(options: EvaluationArguments) -> list[dict[str, Any]]:
    with errors_as_messages(*INPUT_ERRORS):
        if options.compare is None:
            raise ValueError(f"{options.model} is a result; name another one with --compare")
        first = results.read_result(options.model)
        second = results.read_result(options.compare)
        rows = results.compare(first, second)
    results.show_differences(rows, first, second)
    return rows


def _token_ids(policy: Policy, prompts: Sequence[Any], options: EvaluationArguments) -> list[list[int]]:
    """Return the prompts in tokens; raise `ValueError` when a completion would not fit into the model's positions, or a
    conversation has no template."""
    if not isinstance(prompts[0], str) and policy.tokenizer.chat_template is None:
        raise ValueError("conversational: true needs a chat template, and the tokenizer has none")
    token_ids = tokenize(policy.tokenizer, prompts, options.chat_template_kwargs)["input_ids"]
    longest = max(map(len, token_ids))
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + options.max_new_tokens > positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens, with --max_new_tokens {options.max_new_tokens} more than the "
            f"{positions} positions of the model; shorten the completions or the prompts"
        )
    return token_ids


def _default_folder(options: EvaluationArguments) -> Path:
    """Return a folder by model (its last two names, as `policy` alone says little), task and control."""
    model = "-".join(part for part in Path(options.model).parts[-2:] if part not in ("/", ".", "..", "~"))
    what = options.task_name
    if options.dequantize:
        what += f"-{options.dequantize}"
    return Path("outputs/evaluation") / model / what


def _open_logs(
    options: EvaluationArguments, policy: Policy, task: Task, token_ids: list[list[int]], folder: Path
) -> dict[bool, ResumeLog]:
    """Open the files of completions, by whether they are sampled: first what they depend on, then one a line."""
    # Another source of the scores means that verdicts on disk may be out of date.
    sources = set()
    for score in task.scores.values():
        with contextlib.suppress(TypeError):  # written in C
            sources.add(Path(inspect.getsourcefile(score if inspect.isroutine(score) else type(score))))
    common = {
        "task": task.name,
        "problems": len(token_ids),
        "prompts": results.digest([token_ids, list(task.test["answer"])]),
        "model": policy.identity,
        **{name: policy.description[name] for name in ("computed_in", "dtype", "attention", "n_quantized")},
        "max_new_tokens": options.max_new_tokens,
        "scores": results.digest([path.read_text() for path in sorted(sources)]),
    }
    files = {False: ("greedy.jsonl", common)}
    if options.samples:
        sampling = {"temperature": options.temperature, "seed": options.seed}
        files[True] = "samples.jsonl", {**common, **sampling}
    return {
        sampled: ResumeLog(
            folder / name, header, lambda line: (line["sample"], line["problem"]), overwrite=options.overwrite
        )
        for sampled, (name, header) in files.items()
    }


def _plan(lengths: Sequence[int], options: EvaluationArguments) -> list[Batch]:
    """List all batches, whatever is done already, so that the draws of a batch are the same in every attempt. The
    longest prompts come first: what does not fit into memory fails at once, and batches have little padding."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    size = options.batch_size
    groups = [tuple(order[start : start + size]) for start in range(0, len(order), size)]
    batches = [Batch(rows) for rows in groups]
    for sample in range(options.samples):
        for rows in groups:
            seed = int(results.digest([options.seed, sample, rows[0]]), 16)
            batches.append(Batch(rows, sample, seed))
    return batches


def _complete(
    policy: Policy, task: Task, batches: list[Batch], logs: dict[bool, ResumeLog], options: EvaluationArguments
) -> int:
    """Complete, score and keep the completions that are missing; return their number. A batch of which one is missing
    is done again as a whole, for the same draws."""
    is_main_process = PartialState().is_main_process
    wanted = {(batch.sample, row) for batch in batches for row in batch.rows}
    (done,) = broadcast_object_list([[key for log in logs.values() for key in log.done]])  # of the main process
    missing = wanted.difference(done)
    rounds = complete_batches(
        policy.model,
        policy.tokenizer,
        task.test,
        task.scores,
        [batch for batch in batches if any((batch.sample, row) in missing for row in batch.rows)],
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    progress = tqdm(
        total=len(wanted),
        initial=len(wanted) - len(missing),
        desc="evaluating",
        unit="completion",
        disable=not is_main_process,
    )
    try:
        with progress:
            for completions in rounds:
                if not is_main_process:
                    continue
                for completion in completions:
                    if completion.key in missing:
                        logs[completion.sample is not None].add(asdict(completion))
                        progress.update()
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on from here") from None
    return len(missing)


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
