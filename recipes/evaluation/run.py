# SPDX-License-Identifier: Apache-2.0
"""One evaluation from the command line to the result."""

import hashlib
import inspect
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate import PartialState
from tqdm.auto import tqdm

from hf_mxfp4.files import write_json
from hf_mxfp4.lab.stats import bootstrap_mean
from recipes.common.records import versions
from recipes.common.terminal import INPUT_ERRORS, console, errors_as_messages, tell
from recipes.tasks import Task, call_reward

from . import results
from .arguments import EvaluationArguments, parse
from .generate import Batch, Completion, CompletionFile, ScoredCompletion, complete_batches, tokenize
from .policy import Policy, load_policy


#: Those that decide what is measured.
PACKAGES = ("hf-mxfp4", "torch", "transformers", "peft", "accelerate", "evaluate", "math-verify")


def main(argv: list[str]) -> dict[str, Any]:
    """Evaluate, or compare two results; return the result that is also written, or the differences."""
    options = parse(argv)
    if options.model.endswith(".json"):
        return {"differences": _compare_files(options)}
    started = time.monotonic()
    state = PartialState(cpu=options.use_cpu)
    with errors_as_messages(*INPUT_ERRORS):
        task = options.load_task(test_only=True)
        other = None if options.compare is None else results.read_result(options.compare)
        policy = load_policy(
            options.model,
            control=options.dequantize,
            base=options.base,
            dtype=options.dtype,
            revision=options.revision,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
            device=state.device,
        )
        options.max_new_tokens = options.max_new_tokens or task.max_completion_length
        prompts = list(task.test["prompt"])
        token_ids = _token_ids(policy, prompts, options.max_new_tokens)
        keys = results.problem_keys(prompts, task.test["answer"])
        if other is not None:
            results.check_same_problems(keys, task.name, other)
        folder = Path(options.output_dir) if options.output_dir else _default_folder(options)
        files = _open_files(options, policy, task, token_ids, folder)
    about = policy.description
    tell("scheme", about["computed_in"] + (f": {policy.preset}" if policy.preset else ""))
    tell("layers", f"n_quantized={about['n_quantized']} n_skipped={about['n_skipped']}")
    if not options.conversational and policy.tokenizer.chat_template is not None:
        tell("prompts", "plain text; --conversational uses the chat template of the tokenizer")

    generated = _complete(policy, task, _plan([len(ids) for ids in token_ids], options), files, options)
    if not state.is_main_process:
        return {}
    completions = [completion for file in files.values() for completion in file.found.values()]
    names = ("max_new_tokens", "conversational", "samples", "temperature", "top_p", "seed", "batch_size")
    result = {
        "task": task.name,
        **about,
        **results.summarize(
            completions,
            keys,
            list(task.scores),
            greedy=not options.no_greedy,
            samples=options.samples,
            ks=options.ks,
            seed=options.seed,
        ),
        "generation": {name: getattr(options, name) for name in names},
        "identity": policy.identity,
        "versions": versions(PACKAGES),
        "device": str(state.device),
        "processes": state.num_processes,
        "generated": generated,
        "seconds": round(time.monotonic() - started, 1),
    }
    if options.reward is not None:
        with errors_as_messages(ValueError):
            result["reward"] = _mean_rewards(options, task, completions)
    if other is not None:
        result["compared_with"] = str(options.compare)
        result["differences"] = results.compare(result, other)
    write_json(folder / results.RESULT_FILE, result, indent=1, ensure_ascii=False)
    console.print(results.table(result))
    if other is not None:
        console.print(results.difference_table(result["differences"], result, other))
    console.print(f"written to {folder / results.RESULT_FILE}", highlight=False, markup=False)
    return result


def _mean_rewards(options: EvaluationArguments, task: Task, completions: Sequence[ScoredCompletion]) -> dict[str, Any]:
    """The mean over problems of the reward of greedy and of sampled completions, with bootstrap intervals."""
    found: dict[str, Any] = {"name": options.reward}
    for name, sampled in ((results.GREEDY, False), ("sampled", True)):
        chosen = [one for one in completions if (one.sample is not None) == sampled]
        if not chosen:
            continue
        rows = task.test.select([one.problem for one in chosen])
        texts = [one.completion for one in chosen]
        rewards = call_reward(task.reward_funcs[0], options.reward, rows["prompt"], texts, rows["answer"])
        by_problem: dict[int, list[float]] = {}
        for one, reward in zip(chosen, rewards, strict=True):
            if reward is not None:
                by_problem.setdefault(one.problem, []).append(reward)
        if not by_problem:
            raise ValueError(f"reward={options.reward!r} gave None for every {name} completion")
        found[name] = bootstrap_mean([fmean(values) for values in by_problem.values()], options.seed).to_dict()
    return found


def _compare_files(options: EvaluationArguments) -> list[dict[str, Any]]:
    with errors_as_messages(*INPUT_ERRORS):
        if options.compare is None:
            raise ValueError(f"{options.model} is a result; name another one with --compare")
        first, second = (results.read_result(path) for path in (options.model, options.compare))
        rows = results.compare(first, second)
    console.print(results.difference_table(rows, first, second))
    return rows


def _token_ids(policy: Policy, prompts: Sequence[Any], max_new_tokens: int) -> list[list[int]]:
    """The prompts in tokens; raises `ValueError` when a completion would not fit into the model's positions, or a
    conversation has no template."""
    if not isinstance(prompts[0], str) and policy.tokenizer.chat_template is None:
        raise ValueError("--conversational needs a chat template, and the tokenizer has none")
    ids = tokenize(policy.tokenizer, prompts)["input_ids"]
    longest = max(map(len, ids))
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + max_new_tokens > positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens, with --max_new_tokens {max_new_tokens} more than the "
            f"{positions} positions of the model; shorten the completions or the prompts"
        )
    return ids


def _default_folder(options: EvaluationArguments) -> Path:
    """By model (its last two names, as `policy` alone says little), task and control."""
    model = "-".join(part for part in Path(options.model).parts[-2:] if part not in ("/", ".", "..", "~"))
    return Path("outputs/evaluation") / model / "-".join(filter(None, (options.task, options.dequantize)))


def _open_files(
    options: EvaluationArguments,
    policy: Policy,
    task: Task,
    token_ids: list[list[int]],
    folder: Path,
) -> dict[bool, CompletionFile]:
    """The files of completions, by whether they are sampled. All processes read them, one will write."""
    # Another source of the scores means that verdicts on disk may be out of date.
    sources = {Path(inspect.getsourcefile(score)) for score in task.scores.values()}
    common = {
        "task": task.name,
        "problems": len(token_ids),
        "prompts": _digest([token_ids, list(task.test["answer"])]),
        "model": policy.identity,
        **{name: policy.description[name] for name in ("computed_in", "dtype", "attention", "n_quantized")},
        "max_new_tokens": options.max_new_tokens,
        "scores": hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:12],
    }
    files = {}
    if not options.no_greedy:
        files[False] = CompletionFile(folder / "greedy.jsonl", common, options.overwrite)
    if options.samples:
        sampling = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
        files[True] = CompletionFile(folder / "samples.jsonl", {**common, **sampling}, options.overwrite)
    PartialState().wait_for_everyone()  # before one writes
    return files


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _plan(lengths: Sequence[int], options: EvaluationArguments) -> list[Batch]:
    """All batches, whatever is done already and however many processes there are, so that the draws of a batch are the
    same in every attempt. The longest prompts come first: what does not fit into memory fails at once, and batches have
    little padding."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups = [tuple(order[start : start + options.batch_size]) for start in range(0, len(order), options.batch_size)]
    batches = [] if options.no_greedy else [Batch(rows) for rows in groups]
    for sample in range(options.samples):
        for rows in groups:
            seed = int(_digest([options.seed, sample, rows[0]]), 16)
            batches.append(Batch(rows, sample, seed, options.temperature, options.top_p))
    return batches


def _complete(
    policy: Policy,
    task: Task,
    batches: list[Batch],
    files: dict[bool, CompletionFile],
    options: EvaluationArguments,
) -> int:
    """Complete, score and keep the completions that are missing; return their number. A batch of which one is missing
    is done again as a whole, for the same draws."""
    state = PartialState()
    answers = list(task.test["answer"])
    known = {key for file in files.values() for key in file.found}
    todo = {(batch.sample, row) for batch in batches for row in batch.rows} - known
    batches = [batch for batch in batches if any((batch.sample, row) in todo for row in batch.rows)]
    wanted = len(answers) * (options.samples + (not options.no_greedy))
    bar = tqdm(
        total=wanted,
        initial=wanted - len(todo),
        desc="evaluating",
        unit="completion",
        disable=not state.is_main_process,
    )

    def keep(found: list[tuple[Batch, int, Completion]]) -> None:
        if not state.is_main_process:
            return
        new = [
            ScoredCompletion(
                row,
                batch.sample,
                one.text,
                one.n_tokens,
                one.truncated,
                {name: bool(score(one.text, answers[row])) for name, score in task.scores.items()},
            )
            for batch, row, one in found
            if (batch.sample, row) in todo
        ]
        for sampled, file in files.items():
            file.append(one for one in new if (one.sample is not None) == sampled)
        bar.update(len(new))

    try:
        complete_batches(
            policy.model,
            policy.tokenizer,
            list(task.test["prompt"]),
            batches,
            keep,
            max_new_tokens=options.max_new_tokens,
            cache_weights=not options.no_weight_cache,
        )
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on from here") from None
    finally:
        bar.close()
    return len(todo)
