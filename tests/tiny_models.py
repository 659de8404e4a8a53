# SPDX-License-Identifier: Apache-2.0
"""Decoders of a few thousand parameters, one per family; tokenizers of a few hundred tokens, split in several ways."""

import json

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


#: Options that only mixtures of experts know; Mixtral and gpt-oss have `intermediate_size` per expert.
_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERTS = {
    "qwen3_moe": _QWEN,
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make_model(
    family="qwen2", *, layers=2, hidden=64, intermediate=96, tie=False, dtype=torch.float32, seed=0, **extra
):
    """A randomly initialised decoder of a few thousand parameters, vocabulary 32."""
    options = {
        "vocab_size": 32, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": hidden // 2, "max_position_embeddings": 64,
        "tie_word_embeddings": tie, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **_EXPERTS.get(family, {}) | options | extra)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        # Norms and biases start constant; distinct values make their mistakes visible.
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().float().mean()), std=0.1)
    return model.eval()


def save_openai(folder, *, layers=1, **options):
    """Save a checkpoint as OpenAI's of gpt-oss: experts as blocks and scales of random bytes, the rest bfloat16."""
    make_model("gpt_oss", layers=layers, dtype=torch.bfloat16, **options).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(115, 125, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skips = ["self_attn", "mlp.router"]
    skips = [*(f"model.layers.*.{name}" for name in skips), "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skips}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- tokenizers -----------------------------------------------------------------------------------------------------


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
