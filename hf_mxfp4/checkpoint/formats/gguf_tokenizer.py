# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint as metadata of a GGUF file: tokens, merges or scores, special tokens, chat template.

llama.cpp splits text by rules of its own before it merges, and a file names one of them (`tokenizer.ggml.pre`). Which
one a tokenizer needs is read off its `tokenizer.json`. One that llama.cpp has no equal of is left out, with a reason.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..folder import read_json


if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig


_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_O200K_REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: What text is split by before the bytes are merged -> llama.cpp's name of it.
_SPLITS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",): "qwen2",
    (rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",): "llama-bpe",
    (f"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|{_O200K_REST}",): "gpt-4o",
}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: Added tokens that are not marked special and yet are no text.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>")


@dataclass(frozen=True)
class Tokenizer:
    """What a file needs of a tokenizer; those with bytes as a fallback have ``scores``, others merges."""

    folder: Path
    split_name: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None = None
    prefixes_space: bool = False

    def add_to(self, writer: "GGUFWriter") -> None:
        """Add the metadata, those of special tokens and the chat template as the package `gguf` finds them."""
        import gguf

        # llama.cpp calls a tokenizer that merges bytes "gpt2", and one with scores "llama".
        writer.add_tokenizer_model("gpt2" if self.scores is None else "llama")
        writer.add_tokenizer_pre(self.split_name)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.prefixes_space)
        special = gguf.SpecialVocab(self.folder, load_merges=self.scores is None, n_vocab=len(self.tokens))
        # llama.cpp has a default for each kind; what the post-processor in tokenizer.json does is read already.
        special.add_special_token.setdefault("bos", False)
        special.add_to_gguf(writer, quiet=True)


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | str:
    """Return the tokenizer in ``folder``, or why there is none that llama.cpp could use."""
    if not (folder / "tokenizer.json").is_file():
        return f"{folder} has no tokenizer.json"
    stored = read_json(folder / "tokenizer.json")
    model = stored.get("model") or {}
    if model.get("type") != "BPE":
        return f"llama.cpp has no tokenizer of the type {model.get('type')!r}"
    added = {token["id"]: token for token in stored.get("added_tokens") or ()}
    known = {number: text for text, number in model["vocab"].items()}
    known |= {number: token["content"] for number, token in added.items()}
    if max(known, default=0) >= vocab_size:
        return f"the tokenizer has {max(known) + 1} tokens, the model {vocab_size}"
    # A model may have room for more tokens than the tokenizer has.
    numbers = range(vocab_size)
    tokens = [known.get(number, f"[PAD{number}]") for number in numbers]
    merges_bytes = not model.get("byte_fallback")
    if merges_bytes:
        split_name = _split_name(stored)
        scores = None
    else:
        split_name = "default"
        scores = _scores(model["merges"], tokens)
    if split_name is None:
        return "llama.cpp has no name for the way in which the tokenizer splits text (pre_tokenizer)"
    kinds = [_kind(known.get(number), added.get(number), merges_bytes) for number in numbers]
    return Tokenizer(folder, split_name, tokens, kinds, scores, _prefixes_space(stored))


def add_no_tokenizer(writer: "GGUFWriter", config: "PreTrainedConfig") -> None:
    """Say in the metadata that there is no tokenizer, and which numbers begin and end a text."""
    writer.add_tokenizer_model("no_vocab")
    for kind in ("bos", "eos", "pad"):
        number = getattr(config, f"{kind}_token_id", None)
        if isinstance(number, int):
            getattr(writer, f"add_{kind}_token_id")(number)


def _split_name(tokenizer: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of the way that a `tokenizer.json` splits text; `None` if it has none."""
    splitter = tokenizer.get("pre_tokenizer") or {}
    parts = []
    for step in splitter.get("pretokenizers", [splitter]):
        kind = step.get("type")
        if kind == "Split" and step.get("behavior") == "Isolated":
            parts.append(step["pattern"].get("Regex"))
        elif kind == "Digits" and step.get("individual_digits"):
            parts.append("digits")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            if step.get("use_regex", True):
                parts.append("bytes")
        else:
            return None
    return _SPLITS.get(tuple(parts))


def _kind(text: str | None, added: dict[str, Any] | None, merges_bytes: bool) -> int:
    """Return the type of a token, by its text and its entry among the added tokens."""
    from gguf import TokenType

    if text is None:
        return TokenType.UNUSED
    if added is not None:
        if added.get("special") or _LOOKS_SPECIAL.fullmatch(text):
            return TokenType.CONTROL
        return TokenType.USER_DEFINED
    if not merges_bytes and _BYTE.fullmatch(text):
        return TokenType.BYTE
    return TokenType.NORMAL


def _scores(merges: list[Any], tokens: list[str]) -> list[float]:
    """Return minus the rank of the first merge that makes a token: llama.cpp merges the highest score first."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        # Files have pairs, or in an older form texts with a space between the two.
        token = pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)
        ranks.setdefault(token, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _prefixes_space(tokenizer: dict[str, Any]) -> bool:
    """Return whether a space comes before text, by the normalizer or the way that text is split."""
    steps = json.dumps([tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")])
    if '"Prepend"' in steps:
        return True
    return '"Metaspace"' in steps and '"prepend_scheme": "never"' not in steps
