# SPDX-License-Identifier: Apache-2.0
"""Text to pretrain on, as sequences of equal length: a generated language, local files, or a streamed Hub dataset."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipes.tasks.tiny_model import build_byte_tokenizer, build_char_tokenizer

from .arguments import StudyArguments
from .generated import ALPHABET, Language, generate


#: Documents that a streamed dataset is shuffled among.
_SHUFFLE_BUFFER = 10_000


@dataclass
class Corpus:
    """Sequences to train and validate on.

    Attributes:
        tokenizer: what made them.
        train: rows of ``input_ids`` and ``labels``, endless or not.
        validation: the same, the same for all seeds.
        entropy: nats per validation token under the generator itself, the loss that no model can stay below; `None`
            where the text was not generated.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Dataset | IterableDataset
    validation: Dataset
    entropy: float | None = None

    def ordered(self, seed: int, batch: int) -> tuple[Dataset | IterableDataset, str]:
        """The training sequences in the order of a seed, the same for every arm, and a checksum that says so.

        As many as fill whole steps of ``batch`` sequences. Raises `ValueError` for less than one.
        """
        if isinstance(self.train, IterableDataset):
            return self.train.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER), f"streamed in the order of seed {seed}"
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        order = order[: len(order) // batch * batch]
        if len(order) == 0:
            raise ValueError(f"the training text has {len(self.train)} sequences, less than a step of {batch}")
        shuffled = self.train.select(order.tolist())
        with_ids = shuffled.with_format("numpy", columns=["input_ids"])
        digest = hashlib.sha256()
        for batch in with_ids.iter(batch_size=1024):
            digest.update(batch["input_ids"].tobytes())
        return shuffled, digest.hexdigest()


def load_tokenizer(options: StudyArguments) -> PreTrainedTokenizerBase:
    """The tokenizer that the options ask for. Raises `OSError` when it cannot be loaded."""
    if options.corpus == "generated":
        return build_char_tokenizer(ALPHABET)
    if options.tokenizer_name is None:
        return build_byte_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer_name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {options.tokenizer_name!r} has no end-of-sequence token between documents")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_corpus(options: StudyArguments, tokens: int) -> Corpus:
    """The corpus that the options ask for.

    Args:
        options: of the study.
        tokens: to train on; a generated corpus has as many and repeats nothing.

    Raises:
        FileNotFoundError: a file is missing.
        RuntimeError: the Hub cannot be reached or lacks the dataset.
        ValueError: there is too little text.
    """
    tokenizer = load_tokenizer(options)
    if options.corpus == "generated":
        return _generated(options, tokenizer, tokens)
    if options.corpus == "files":
        train, validation = (
            _packed(_read_files(files, options.text_column), tokenizer, options.text_column, options.sequence_length)
            for files in (options.data_files, options.validation_files)
        )
    else:
        train, validation = _stream(options, tokenizer)
    validation = _first_sequences(validation, options)
    return Corpus(tokenizer, train, validation)


def _generated(options: StudyArguments, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Corpus:
    language = Language(options.corpus_seed)
    length = options.sequence_length
    sizes = {"train": tokens, "validation": options.validation_sequences * length}
    sets, entropy = {}, 0.0
    for split, size in sizes.items():
        # One sequence more, for what packing leaves over.
        texts, entropy = generate(language, split, size + length)
        sets[split] = _packed(Dataset.from_dict({"text": texts}), tokenizer, "text", length).select(
            range(size // length)
        )
    return Corpus(tokenizer, sets["train"], sets["validation"], entropy)


def _packed(dataset: Any, tokenizer: PreTrainedTokenizerBase, column: str, length: int) -> Any:
    """Documents joined by the end-of-sequence token and cut into sequences; what is left over is dropped."""

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


def _read_files(files: list[str], column: str) -> Dataset:
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"there is no file {file}")
    kinds = {"json" if Path(file).suffix in (".json", ".jsonl") else "text" for file in files}
    if len(kinds) > 1:
        raise ValueError(f"give text files or JSON lines, not both: {', '.join(files)}")
    if kinds == {"json"}:
        return load_dataset("json", data_files=files, split="train")
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    return Dataset.from_dict({column: texts})


def _stream(options: StudyArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Any]:
    streams = []
    for split in ("train", options.validation_split):
        try:
            stream = load_dataset(options.dataset_name, options.dataset_config, split=split, streaming=True)
        except Exception as error:  # datasets raises what its storage raises
            raise RuntimeError(
                f"cannot stream {options.dataset_name!r} ({options.dataset_config}, {split}): {error}\nIt needs the "
                "Hub; without it use corpus: files with data_files, or corpus: generated."
            ) from error
        if stream.column_names is None:
            stream = stream.select_columns([options.text_column])
        streams.append(_packed(stream, tokenizer, options.text_column, options.sequence_length))
    return streams[0], streams[1]


def _first_sequences(validation: Any, options: StudyArguments) -> Dataset:
    count = options.validation_sequences
    rows = [{key: value.tolist() for key, value in row.items()} for row in validation.take(count)]
    if len(rows) < count:
        raise ValueError(
            f"the validation text has {len(rows)} sequences of {options.sequence_length} tokens; lower "
            f"validation_sequences={count}, or give more text"
        )
    return Dataset.from_list(rows).with_format("torch")
