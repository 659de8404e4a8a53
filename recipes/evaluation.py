# SPDX-License-Identifier: Apache-2.0
"""Greedy evaluation of a policy on a task's test split."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mxfp4 import cached_weights, uncached_weights


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


@torch.no_grad()
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
    share = list(range(state.process_index, len(dataset), state.num_processes))
    was_training = model.training
    model.eval()
    mine: list[tuple[int, str]] = []
    bar = tqdm(total=len(share), desc=title, unit="problem", disable=not state.is_main_process)
    try:
        with cached_weights() if cache_weights else uncached_weights():
            # Sharded weights are gathered by all processes together: all run as many batches as the longest share.
            for start in range(0, -(-len(dataset) // state.num_processes), batch_size):
                mine_now = share[start : start + batch_size]
                indices = mine_now or [0]
                texts = [as_text(tokenizer, dataset[i]["prompt"]) for i in indices]
                batch = tokenizer(
                    texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
                ).to(model.device)
                batch.pop("token_type_ids", None)
                output = model.generate(
                    **batch,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    pad_token_id=tokenizer.pad_token_id,
                )
                new_tokens = output[:, batch["input_ids"].shape[1] :]
                texts = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
                mine += zip(mine_now, texts[: len(mine_now)], strict=True)
                bar.update(len(mine_now))
    finally:
        bar.close()
        model.train(was_training)
    completions = dict(gather_object(mine))
    ordered = [completions[i] for i in range(len(dataset))]
    correct = {
        name: [score(text, row["answer"]) for text, row in zip(ordered, dataset, strict=True)]
        for name, score in scores.items()
    }
    return Evaluation(ordered, correct)


def as_text(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]) -> str:
    """A prompt as the text that the model continues."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def write_completions(evaluation: Evaluation, dataset: Dataset, path: Path) -> None:
    """One JSON line per problem: prompt, answer, completion, and whether each score found it correct."""
    with path.open("w", encoding="utf-8") as file:
        for i, (row, completion) in enumerate(zip(dataset, evaluation.completions, strict=True)):
            verdicts = {name: flags[i] for name, flags in evaluation.correct.items()}
            record = {"prompt": row["prompt"], "answer": row["answer"], "completion": completion, **verdicts}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
