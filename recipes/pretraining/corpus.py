# SPDX-License-Identifier: Apache-2.0
"""Text to pretrain on, as sequences of equal length: a generated language, or a streamed Hub dataset."""

import itertools
import math
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

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
    if options.corpus == "generated":
        return _generated(tokens, options.sequence_length, options.validation_sequences)
    tokenizer = _tokenizer(options.tokenizer_name)
    train = _packed(_stream(options, "train"), tokenizer, options)
    wanted = options.validation_sequences
    validation = Dataset.from_list(list(_packed(_stream(options, "validation"), tokenizer, options).take(wanted)))
    if len(validation) < wanted:
        raise ValueError(
            f"the validation text has {len(validation)} sequences of {options.sequence_length} tokens; lower "
            f"validation_sequences={wanted}, or give more text"
        )
    return Corpus(tokenizer, train.with_format("torch"), validation.with_format("torch"))


def _tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    if name is None:
        return build_byte_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name!r} has no end-of-sequence token between documents")
    return tokenizer


def _stream(options: StudyArguments, split: str) -> IterableDataset:
    """Return the texts of a split, streamed from the Hub."""
    stream = load_dataset(options.dataset_name, options.dataset_config, split=split, streaming=True)
    column = options.text_column
    columns = stream.column_names
    if columns is not None and column not in columns:
        raise ValueError(f"there is no column {column!r} to read text from; text_column can be {', '.join(columns)}")
    return stream.select_columns([column])


def _packed(stream: IterableDataset, tokenizer: PreTrainedTokenizerBase, options: StudyArguments) -> IterableDataset:
    """Return the sequences of a stream of texts."""

    def pack_batch(batch: dict[str, list]) -> dict[str, list]:
        return pack(batch[options.text_column], tokenizer, options.sequence_length)

    return stream.map(pack_batch, batched=True, batch_size=1000, remove_columns=[options.text_column])


def pack(texts: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> dict[str, list]:
    """Join texts by the end-of-sequence token and cut them into sequences; what is left over is dropped."""
    stream: list[int] = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id]
    rows = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
    return {"input_ids": rows, "labels": rows}


# ---- the generated language -----------------------------------------------------------------------------------------

ALPHABET = string.ascii_lowercase + string.digits + "+=| "
_KINDS = {"sentence": 0.6, "sum": 0.2, "copy": 0.2}
_SENTENCE_LENGTHS = range(4, 13)
_COPY_LENGTHS = range(3, 9)
_TERMS = range(100)
#: Classes of words, and words of a class.
_N_CLASSES = 8
_N_WORDS = 150


def _generated(tokens: int, length: int, validation_sequences: int) -> Corpus:
    tokenizer = build_char_tokenizer(ALPHABET)
    language = Language()

    def sequences(split: str, count: int) -> tuple[Dataset, float]:
        # One more, for what packing leaves over.
        texts, entropy = generate(language, split, (count + 1) * length)
        rows = Dataset.from_dict(pack(texts, tokenizer, length))
        return rows.select(range(count)).with_format("torch"), entropy

    train, _ = sequences("train", tokens // length)
    validation, entropy = sequences("validation", validation_sequences)
    return Corpus(tokenizer, train, validation, entropy)


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
        a = draw.choice(_TERMS)
        b = draw.choice(_TERMS)
        return f"{a}+{b}={a + b}", 2 * math.log(len(_TERMS))

    def _copy(self, draw: random.Random) -> tuple[str, float]:
        length = draw.choice(_COPY_LENGTHS)
        letters = "".join(draw.choices(string.ascii_lowercase, k=length))
        return f"{letters}|{letters}", math.log(len(_COPY_LENGTHS)) + length * math.log(26)


def generate(language: Language, split: str, tokens: int) -> tuple[list[str], float]:
    """Generate documents of at least ``tokens`` characters, each with its end counted as one more; return them and the
    nats per character."""
    texts = []
    count = 0
    total = 0.0
    documents = language.documents(split)
    while count < tokens:
        text, nats = next(documents)
        texts.append(text)
        count += len(text) + 1
        total += nats
    return texts, total / count
