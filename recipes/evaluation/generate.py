# SPDX-License-Identifier: Apache-2.0
"""Completions of a task's test split by a policy: made in batches by all processes, evaluated, and kept on disk."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from hf_mxfp4 import cached_weights, uncached_weights
from hf_mxfp4.files import append_lines, replace_file


@dataclass(frozen=True)
class Evaluation:
    """Completions of every prompt, and the share of correct ones by each score."""

    completions: list[str]
    correct: dict[str, list[bool]]

    def accuracy(self, score: str) -> float:
        """Share of correct completions, 0 to 1."""
        return sum(self.correct[score]) / len(self.correct[score])

    def standard_error(self, score: str) -> float:
        """Of the accuracy, from the number of problems alone."""
        p = self.accuracy(score)
        return math.sqrt(p * (1 - p) / len(self.correct[score]))


@dataclass(frozen=True)
class Completion:
    """What a model wrote.

    Attributes:
        text: without special tokens.
        n_tokens: generated tokens, the end of sequence included.
        truncated: whether the end of sequence was not among them.
    """

    text: str
    n_tokens: int
    truncated: bool


@dataclass(frozen=True)
class Batch:
    """Prompts that are completed together.

    Attributes:
        rows: which prompts. A batch without any takes part in sharded computation and yields nothing.
        sample: number of the sample of each prompt; `None`: the greedy one.
        seed: of the draws.
        temperature, top_p: of the distribution that tokens are drawn from.
    """

    rows: tuple[int, ...]
    sample: int | None = None
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0


@torch.no_grad()
def complete_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[dict[str, str]]],
    batches: Sequence[Batch],
    on_round: Callable[[list[tuple[Batch, int, Completion]]], None],
    *,
    max_new_tokens: int,
    cache_weights: bool = True,
) -> None:
    """Complete every batch. Under a launcher the processes take turns: process r of w takes batches r, r + w, ...

    Each time that every process has finished one, ``on_round`` gets, on all of them, what all have written: batch, row
    and completion. The draws of a batch depend on its seed and rows alone; the global random state stays as it was.
    ``cache_weights`` as `cache_rollout_weights` of `MXFP4GRPOConfig`.
    """
    state = PartialState()
    was_training = model.training
    model.eval()
    try:
        with cached_weights(model) if cache_weights else uncached_weights(model):
            # Sharded weights are gathered by all processes together: all run as many batches.
            for start in range(0, len(batches), state.num_processes):
                mine = start + state.process_index
                batch = batches[mine] if mine < len(batches) else Batch(())
                rows = batch.rows or (0,)
                found = _complete(model, tokenizer, [prompts[row] for row in rows], batch, max_new_tokens)
                on_round(gather_object([(batch, row, one) for row, one in zip(batch.rows, found, strict=False)]))
    finally:
        model.train(was_training)


def _complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list, batch: Batch, max_new_tokens: int
) -> list[Completion]:
    inputs = tokenize(tokenizer, prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    inputs.pop("token_type_ids", None)
    sampled = batch.sample is not None
    # As TRL's rollouts, whatever the checkpoint's generation_config.json has (Qwen2.5-Instruct: 1.05).
    how = {"do_sample": sampled, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
    if sampled:
        how |= {"temperature": batch.temperature, "top_p": batch.top_p, "top_k": 0}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=sampled):
        if sampled:
            torch.manual_seed(batch.seed)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, **how)
    written = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    ends = set(ends) if isinstance(ends, list) else {ends}
    return [_completion(text, tokens, ends) for text, tokens in zip(texts, written.tolist(), strict=True)]


def _completion(text: str, tokens: list[int], ends: set[int]) -> Completion:
    """What follows the first end of sequence is padding."""
    end = next((place for place, token in enumerate(tokens) if token in ends), None)
    return Completion(text, len(tokens) if end is None else end + 1, end is None)


def evaluate_greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    scores: dict[str, Callable[[str, str], bool]],
    *,
    max_new_tokens: int,
    batch_size: int = 128,
    title: str = "evaluating",
    cache_weights: bool = True,
) -> Evaluation:
    """Complete every prompt of ``dataset`` (columns ``prompt``, ``answer``) greedily and score the completions.

    Under a launcher each process takes a share, and all get the whole result. ``cache_weights`` as
    `cache_rollout_weights` of `MXFP4GRPOConfig`.
    """
    state = PartialState()
    shares = [range(rank, len(dataset), state.num_processes) for rank in range(state.num_processes)]
    # In the order of the dataset, so that a part of it is completed in the batches of the whole.
    batches = [
        Batch(tuple(share[start : start + batch_size]))
        for start in range(0, len(shares[0]), batch_size)
        for share in shares
    ]
    completions: dict[int, str] = {}
    with tqdm(total=len(dataset), desc=title, unit="problem", disable=not state.is_main_process) as bar:

        def keep(found: list[tuple[Batch, int, Completion]]) -> None:
            completions.update((row, completion.text) for _, row, completion in found)
            bar.update(len(found))

        options = {"max_new_tokens": max_new_tokens, "cache_weights": cache_weights}
        complete_batches(model, tokenizer, list(dataset["prompt"]), batches, keep, **options)
    ordered = [completions[i] for i in range(len(dataset))]
    correct = {
        name: [score(text, row["answer"]) for text, row in zip(ordered, dataset, strict=True)]
        for name, score in scores.items()
    }
    return Evaluation(ordered, correct)


def tokenize(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | list[dict[str, str]]], **options: Any
) -> BatchEncoding:
    """Prompts as TRL's trainer tokenizes them: text with the special tokens that the tokenizer puts around it (as the
    begin of sequence of Llama), conversations by the chat template, which writes its own."""
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts), **options)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in prompts]
    return tokenizer(texts, add_special_tokens=False, **options)


def write_completions(evaluation: Evaluation, dataset: Dataset, path: Path) -> None:
    """One JSON line per problem: prompt, answer, completion, and whether each score found it correct."""
    with path.open("w", encoding="utf-8") as file:
        for i, (row, completion) in enumerate(zip(dataset, evaluation.completions, strict=True)):
            verdicts = {name: flags[i] for name, flags in evaluation.correct.items()}
            record = {"prompt": row["prompt"], "answer": row["answer"], "completion": completion, **verdicts}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


# ---- on disk -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredCompletion:
    """One line of the file.

    Attributes:
        problem: row of the test split.
        sample: number of the sample; `None`: the greedy completion.
        completion: the text.
        n_tokens, truncated: its length in tokens, and whether it ran into the limit.
        correct: by each score.
    """

    problem: int
    sample: int | None
    completion: str
    n_tokens: int
    truncated: bool
    correct: dict[str, bool]

    @property
    def key(self) -> tuple[int | None, int]:
        return self.sample, self.problem


class CompletionFile:
    """A JSON-lines file: first what the completions depend on (the fingerprint), then one completion per line.

    Args:
        path: need not exist.
        fingerprint: JSON-clean, of the completions that will be added.
        overwrite: forget what the file holds.

    Raises:
        ValueError: the file was made under another fingerprint, or a line is damaged. The last one may be cut short, by
            a process that was killed as it wrote.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any], overwrite: bool = False):
        self.path = path
        #: What the file holds, by sample and problem.
        self.found: dict[tuple[int | None, int], ScoredCompletion] = {}
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._end = 0
        if path.is_file() and not overwrite:
            self._read()

    def _read(self) -> None:
        content = self.path.read_bytes()
        self._end = content.rfind(b"\n") + 1
        stored: dict[str, Any] = self._fingerprint
        for number, line in enumerate(content[: self._end].splitlines(), start=1):
            try:
                record = json.loads(line)
                if number == 1:
                    stored = record["fingerprint"]
                    continue
                completion = ScoredCompletion(**record)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self.path}:{number} is not a line of an evaluation ({error}); take another --output_dir, or "
                    "start again with --overwrite"
                ) from error
            self.found[completion.key] = completion
        names = [key for key in {**stored, **self._fingerprint} if stored.get(key) != self._fingerprint.get(key)]
        if names:
            differences = "; ".join(f"{key}: {stored.get(key)!r}, now {self._fingerprint.get(key)!r}" for key in names)
            raise ValueError(
                f"{self.path} holds completions made in another way ({differences}); give the options that they were "
                "made with to go on, another --output_dir to keep both, or --overwrite to start again"
            )

    def append(self, completions: Iterable[ScoredCompletion]) -> None:
        """Add completions to the file, which is made here, and to `found`. For one process."""
        completions = list(completions)
        if self._end == 0:
            replace_file(self.path, json.dumps({"fingerprint": self._fingerprint}) + "\n")
            self._end = self.path.stat().st_size
        elif self.path.stat().st_size > self._end:
            os.truncate(self.path, self._end)  # a line that was cut short
        append_lines(self.path, map(asdict, completions), ensure_ascii=False)
        self._end = self.path.stat().st_size
        self.found |= {completion.key: completion for completion in completions}
