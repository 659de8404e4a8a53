# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of a few hundred tokens, one for each way in which text is split before bytes are merged."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#: As in the `tokenizer.json` of Qwen2.5, Llama 3 and gpt-oss.
REGEXES = {
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPLITS = ["gpt-2", "smollm", *REGEXES]
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The quick brown fox can't jump over 1234 lazy dogs, we'll see. It's 10/12/2026 in Zürich; naïve 東京 ok\n\n  end.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. 48/2 = 24 clips.",
]
CHAT = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def make_tokenizer(split: str, *, begins: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of 400 tokens that merges bytes; with ``begins`` texts begin with a token."""
    tokenizer = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in REGEXES)
    if split == "gpt-2":
        tokenizer.pre_tokenizer = bytes_of
    else:
        first = pre_tokenizers.Digits(individual_digits=True)
        if split in REGEXES:
            first = pre_tokenizers.Split(Regex(REGEXES[split]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    return _finished(tokenizer, begins)


def make_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like that of Llama 2 and Mixtral: characters are merged, unknown ones spelt in bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(TEXT[1:], trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", *SPECIAL]))
    model = json.loads(trained.to_str())["model"]
    ordered = sorted(model["vocab"], key=model["vocab"].get)
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *ordered[1 + len(SPECIAL) :]]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<unk>", *SPECIAL]])
    return _finished(tokenizer, begins=True)


def _finished(tokenizer: Tokenizer, begins: bool) -> PreTrainedTokenizerFast:
    if begins:
        number = tokenizer.token_to_id("<|im_start|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", number)]
        )
    names = {"pad_token": "<pad>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    whole.chat_template = CHAT
    return whole
