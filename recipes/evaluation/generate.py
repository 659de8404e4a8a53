# SPDX-License-Identifier: Apache-2.0
"""Completions of a task's test split by a policy: made in batches by all processes, and scored."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response

from hf_mxfp4 import cached_weights, uncached_weights
from hf_mxfp4.files import replace_file


Scores = Mapping[str, Callable[[str, str], bool]]


@dataclass(frozen=True)
class Completion:
    """What a model wrote.

    Attributes:
        problem: row of the dataset.
        sample: number of the sample; `None`: the greedy completion.
        completion: the text, without special tokens; without what a model thinks, where its tokenizer can tell.
        n_tokens: generated tokens, the end of sequence included.
        truncated: whether the end of sequence was not among them.
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


@dataclass(frozen=True)
class Batch:
    """Prompts that are completed together.

    Attributes:
        rows: which prompts. A batch without any takes part in sharded computation and yields nothing.
        sample: number of the sample of each prompt; `None`: the greedy one.
        seed: of the draws.
    """

    rows: tuple[int, ...]
    sample: int | None = None
    seed: int = 0


@torch.no_grad()
def complete_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    scores: Scores,
    batches: Sequence[Batch],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    cache_weights: bool = True,
) -> Iterator[list[Completion]]:
    """Complete and score every batch. Under a launcher process r of w completes batches r, r + w, ...

    Each time that every process has finished one, all of them get what all have written. The draws of a batch depend on
    its seed and rows alone; the global random state stays as it was.

    Args:
        dataset: the columns ``prompt`` and ``answer`` of a task.
        temperature: of the distribution that samples are drawn from.
        chat_template_kwargs: of the template of conversations.
        cache_weights: quantize each weight once, and not for each token.
    """
    state = PartialState()
    prompts = list(dataset["prompt"])
    answers = list(dataset["answer"])
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
    is_parsed = not isinstance(prompts[0], str) and tokenizer.response_template is not None
    was_training = model.training
    model.eval()
    try:
        with cached_weights(model) if cache_weights else uncached_weights(model):
            # Sharded weights are gathered by all processes together: all run as many batches.
            for start in range(0, len(batches), state.num_processes):
                batch = Batch(())
                if start + state.process_index < len(batches):
                    batch = batches[start + state.process_index]
                texts = [prompts[row] for row in batch.rows or (0,)]
                padding = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
                inputs = tokenize(tokenizer, texts, chat_template_kwargs, **padding).to(model.device)
                written = _generate(model, tokenizer, inputs, batch, is_parsed, max_new_tokens, sampling)
                completions = []
                for row, (text, n_tokens, truncated) in zip(batch.rows, written, strict=False):
                    correct = {name: bool(score(text, answers[row])) for name, score in scores.items()}
                    completions.append(Completion(row, batch.sample, text, n_tokens, truncated, correct))
                yield gather_object(completions)
    finally:
        model.train(was_training)


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: BatchEncoding,
    batch: Batch,
    is_parsed: bool,
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> list[tuple[str, int, bool]]:
    """Return the text of each completion, its tokens, and whether it lacks the end of sequence."""
    inputs.pop("token_type_ids", None)
    sampled = batch.sample is not None
    ends = _end_tokens(model, tokenizer)
    options = {"temperature": None, "top_p": None, "top_k": None}
    if sampled:
        options = sampling
    # The state of the CPU's generator is kept in any case.
    devices = []
    if model.device.type == "cuda":
        devices.append(model.device)
    with torch.random.fork_rng(devices=devices, enabled=sampled):
        if sampled:
            torch.manual_seed(batch.seed)
        output = model.generate(
            **inputs,
            do_sample=sampled,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=list(ends) or None,
            # As TRL's rollouts, whatever the checkpoint's generation_config.json has (Qwen2.5-Instruct: 1.05).
            repetition_penalty=1.0,
            **options,
        )
    generated = output[:, inputs["input_ids"].shape[1] :].tolist()
    written = []
    for prompt, mask, tokens in zip(inputs["input_ids"], inputs["attention_mask"], generated, strict=True):
        end = next((place for place, token in enumerate(tokens) if token in ends), None)
        if end is not None:
            tokens = tokens[: end + 1]  # padding follows
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if is_parsed:  # as TRL's trainer does
            text = parse_response(tokenizer, tokens, prefix=prompt[mask.bool()].tolist())["content"]
        written.append((text, len(tokens), end is None))
    return written


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that end a completion, by the tokenizer and by the model's generation configuration."""
    ends = {tokenizer.eos_token_id}
    ends_of_model = model.generation_config.eos_token_id
    if isinstance(ends_of_model, list):
        ends.update(ends_of_model)
    else:
        ends.add(ends_of_model)
    ends.discard(None)
    return ends


def end_with_line(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Let completions end with their first line, and return how many tokens end one for that.

    Every token with a line break joins the end tokens in the generation configuration of ``model``, which evaluations,
    TRL's rollouts and saved policies read. So what a model that continues text writes after the line is not trained on.
    Raises `ValueError` for a tokenizer that has no line break.
    """
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    breaks = [token for token, text in enumerate(texts) if "\n" in text]
    if not breaks:
        raise ValueError("a completion of this task ends with its line, and the tokenizer has no line break")
    model.generation_config.eos_token_id = sorted(_end_tokens(model, tokenizer).union(breaks))
    return len(breaks)


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[dict[str, str]]],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> BatchEncoding:
    """Tokenize prompts as TRL's trainer does: text with the special tokens that the tokenizer puts around it (as the
    begin of sequence of Llama), conversations by the chat template, which writes its own."""
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts), **options)
    how = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
    texts = [tokenizer.apply_chat_template(chat, **how) for chat in prompts]
    return tokenizer(texts, add_special_tokens=False, **options)


# ---- greedy completions of a whole dataset --------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """Completions of every prompt, and the share of correct ones by each score."""

    completions: list[str]
    correct: dict[str, list[bool]]

    @property
    def accuracies(self) -> dict[str, float]:
        """The share of correct completions by score, 0 to 1."""
        return {score: fmean(correct) for score, correct in self.correct.items()}


def evaluate_greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    scores: Scores,
    *,
    batch_size: int = 128,
    title: str = "evaluating",
    **options: Any,
) -> Evaluation:
    """Complete every prompt of ``dataset`` greedily; ``options`` are those of [`complete_batches`].

    Under a launcher each process completes a share, and all get the whole result.
    """
    state = PartialState()
    shares = [range(rank, len(dataset), state.num_processes) for rank in range(state.num_processes)]
    # In the order of the dataset, so that a part of it is completed in the batches of the whole.
    batches = [
        Batch(tuple(share[start : start + batch_size]))
        for start in range(0, len(shares[0]), batch_size)
        for share in shares
    ]
    found: list[Completion] = []
    with tqdm(total=len(dataset), desc=title, unit="problem", disable=not state.is_main_process) as bar:
        for completions in complete_batches(model, tokenizer, dataset, scores, batches, **options):
            found += completions
            bar.update(len(completions))
    found.sort(key=lambda one: one.problem)
    correct = {name: [one.correct[name] for one in found] for name in scores}
    return Evaluation([one.completion for one in found], correct)


def write_completions(evaluation: Evaluation, dataset: Dataset, path: Path) -> None:
    """Write one JSON line per problem: prompt, answer, completion, and whether each score found it correct."""
    lines = []
    for i, (row, completion) in enumerate(zip(dataset, evaluation.completions, strict=True)):
        verdicts = {name: flags[i] for name, flags in evaluation.correct.items()}
        record = {"prompt": row["prompt"], "answer": row["answer"], "completion": completion, **verdicts}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    replace_file(path, "".join(lines))
