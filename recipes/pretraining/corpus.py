# SPDX-License-Identifier: Apache-2.0
"""Text to pretrain on, as sequences of equal length: a generated language, or a streamed Hub dataset."""

import itertools
import math
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_mxfp4.recipes.tasks.tiny_model import build_byte_tokenizer, build_char_tokenizer

from .arguments import StudyArguments


@dataclass
class Corpus:
    """Sequences to train and validate on.

    Attributes:
        train, validation: rows of ``input_ids`` and ``labels``; those to validate on are the same for all seeds.
        entropy: nats per validation token under the generator itself, the loss that no model can stay below; `None`
            where the text was not generated.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Dataset | IterableDataset
    validation: Dataset
    entropy: float | None = None

    def ordered(self, seed: int, batch: int) -> Dataset | IterableDataset:
        """Return the training sequences in the order of a seed, the same for every arm: as many as fill whole steps of
        ``batch`` sequences. Raises `ValueError` for less than one."""
        if isinstance(self.train, IterableDataset):
            return self.train.shuffle(seed=seed, buffer_size=10_000)
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        order = order[: len(order) // batch * batch]
        if len(order) == 0:
            raise ValueError(f"the training text has {len(self.train)} sequences, less than a step of {batch}")
        return self.train.select(order.tolist())


def load_corpus(options: StudyArguments, tokens: int) -> Corpus:
    """Load the corpus that the options ask for. A generated one has as many ``tokens`` to train on and repeats nothing.

    Raises `OSError` for what cannot be read, and `ValueError` when there is too little text.
    """
    column, length, count = options.text_column, options.sequence_length, options.validation_sequences
    if options.corpus == "generated":
        return _generated(tokens, length, count)
    tokenizer = _tokenizer(options.tokenizer_name)
    texts = (_stream(options, split) for split in ("train", "validation"))
    train, validation = (_packed(text, tokenizer, column, length) for text in texts)
    rows = [{key: value.tolist() for key, value in row.items()} for row in validation.take(count)]
    if len(rows) < count:
        raise ValueError(
            f"the validation text has {len(rows)} sequences of {length} tokens; lower validation_sequences={count}, or "
            "give more text"
        )
    return Corpus(tokenizer, train, Dataset.from_list(rows).with_format("torch"))


def _tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    if name is None:
        return build_byte_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name!r} has no end-of-sequence token between documents")
    return tokenizer


def _packed(dataset: Any, tokenizer: PreTrainedTokenizerBase, column: str, length: int) -> Any:
    """Join documents by the end-of-sequence token and cut them into sequences; what is left over is dropped."""

    def pack(batch: dict[str, list]) -> dict[str, list]:
        encoded = tokenizer(batch[column], add_special_tokens=False)["input_ids"]
        stream = [token for ids in encoded for token in (*ids, tokenizer.eos_token_id)]
        rows = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
        return {"input_ids": rows, "labels": rows}

    names = dataset.column_names
    if names is not None and column not in names:
        raise ValueError(f"there is no column {column!r} to read text from; text_column can be {', '.join(names)}")
    # One batch for a corpus in memory: nothing is lost between batches.
    size = len(dataset) if isinstance(dataset, Dataset) else 1000
    packed = dataset.map(pack, batched=True, batch_size=max(1, size), remove_columns=names)
    return packed.with_format("torch")


def _stream(options: StudyArguments, split: str) -> Any:
    stream = load_dataset(options.dataset_name, options.dataset_config, split=split, streaming=True)
    return stream.select_columns([options.text_column]) if stream.column_names is None else stream


# ---- the generated language -----------------------------------------------------------------------------------------

ALPHABET = string.ascii_lowercase + string.digits + "+=| "
_KINDS = {"sentence": 0.6, "sum": 0.2, "copy": 0.2}
_SENTENCE_LENGTHS = range(4, 13)
_COPY_LENGTHS = range(3, 9)
_TERMS = range(100)
_N_CLASSES, _N_WORDS = 8, 150


def _generated(tokens: int, length: int, validation_sequences: int) -> Corpus:
    tokenizer = build_char_tokenizer(ALPHABET)
    sets, entropy = {}, 0.0
    for split, size in (("train", tokens), ("validation", validation_sequences * length)):
        # One sequence more, for what packing leaves over.
        texts, entropy = generate(Language(), split, size + length)
        packed = _packed(Dataset.from_dict({"text": texts}), tokenizer, "text", length)
        sets[split] = packed.select(range(size // length))
    return Corpus(tokenizer, **sets, entropy=entropy)


class Language:
    """A made-up language: nothing to download, and its entropy is known.

    A document is a sentence of a probabilistic grammar (a Markov chain over word classes, each with its own words of
    Zipf-distributed frequency), an addition, or letters to copy. The text determines how it was generated, so that the
    generator's log-probability is that of the text, and its mean over a split is the loss that no model can stay below.
    """

    def __init__(self):
        draw = random.Random("grammar 0")
        words: set[str] = set()
        while len(words) < _N_CLASSES * _N_WORDS:
            words.add("".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 6))))
        shuffled = sorted(words)
        draw.shuffle(shuffled)
        self._words = [shuffled[i * _N_WORDS : (i + 1) * _N_WORDS] for i in range(_N_CLASSES)]
        zipf = [1 / rank for rank in range(1, _N_WORDS + 1)]
        self._word_weights = [weight / sum(zipf) for weight in zipf]
        self._word_cumulative = list(itertools.accumulate(self._word_weights))
        rows = [[draw.gammavariate(0.4, 1.0) + 1e-3 for _ in range(_N_CLASSES)] for _ in range(_N_CLASSES)]
        self._transitions = [[weight / sum(row) for weight in row] for row in rows]

    def documents(self, split: str) -> Iterator[tuple[str, float]]:
        """Yield endless documents and the information in each, in nats; a function of ``split`` alone."""
        draw = random.Random(f"documents 0 {split}")
        weights = list(_KINDS.values())
        while True:
            (i,) = draw.choices(range(len(weights)), weights)
            text, nats = getattr(self, f"_{list(_KINDS)[i]}")(draw)
            yield text, nats - math.log(weights[i])

    def _sentence(self, draw: random.Random) -> tuple[str, float]:
        length = draw.choice(_SENTENCE_LENGTHS)
        nats = math.log(len(_SENTENCE_LENGTHS)) + math.log(_N_CLASSES)
        current = draw.randrange(_N_CLASSES)
        text = []
        for position in range(length):
            if position:
                row = self._transitions[current]
                (current,) = draw.choices(range(len(row)), row)
                nats -= math.log(row[current])
            (word,) = draw.choices(range(_N_WORDS), cum_weights=self._word_cumulative)
            nats -= math.log(self._word_weights[word])
            text.append(self._words[current][word])
        return " ".join(text), nats

    def _sum(self, draw: random.Random) -> tuple[str, float]:
        a, b = draw.choice(_TERMS), draw.choice(_TERMS)
        return f"{a}+{b}={a + b}", 2 * math.log(len(_TERMS))

    def _copy(self, draw: random.Random) -> tuple[str, float]:
        length = draw.choice(_COPY_LENGTHS)
        letters = "".join(draw.choices(string.ascii_lowercase, k=length))
        return f"{letters}|{letters}", math.log(len(_COPY_LENGTHS)) + length * math.log(26)


def generate(language: Language, split: str, tokens: int) -> tuple[list[str], float]:
    """Generate documents of at least ``tokens`` characters, each with its end counted as one more; return them and the
    nats per character."""
    texts, count, total = [], 0, 0.0
    documents = language.documents(split)
    while count < tokens:
        text, nats = next(documents)
        texts.append(text)
        count += len(text) + 1
        total += nats
    return texts, total / count
