# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of whole words and single digits, for tasks that are written in a few words."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .tiny_model import EOS, PAD, wrap_tokenizer


#: Words with the space before them, single digits, runs of other characters, blanks: Qwen2's rule. For checkpoints of
#: that architecture `AutoTokenizer` loads Qwen2's class whatever was saved, so it must split texts as that class does.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LARGEST_VOCABULARY = 100_000


def build_word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows every word of ``texts`` as one token, with the space before it: ids 0 = pad, 1 = eos,
    then 256 bytes, then the merges. Digits are tokens of their own. Pads left; any text round-trips.

    Raises:
        ValueError: there is no text.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_LARGEST_VOCABULARY,
        min_frequency=1,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = list(texts)
    if not any(texts):
        raise ValueError("a tokenizer of words needs texts to take them from")
    backend.train_from_iterator(texts, trainer)
    return wrap_tokenizer(backend)
