# SPDX-License-Identifier: Apache-2.0
"""Models small enough to post-train on a CPU: tokenizers, a Qwen2 or a Qwen3 mixture of experts, and the supervised
warm-up that RL starts from.

RL on verifiable rewards cannot start from random weights, because no rollout is ever rewarded. The warm-up teaches
part of the task, and is short enough to leave room for RL to improve.
"""

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    set_seed,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


# The end has the name that Qwen2 tokenizers add when a vocabulary lacks it.
PAD = "<pad>"
EOS = "<|endoftext|>"
# Plain text: the tokenizers below never read special tokens from text, so the template cannot use any.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_IGNORED = -100


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # the text "<pad>" is five characters, not padding: every text round-trips
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character of `alphabet`: ids 0 = pad, 1 = eos, then the characters in order.
    Encoding another character raises ("Missing [UNK] token")."""
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate([PAD, EOS, *alphabet])}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _wrap(backend)


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per UTF-8 byte: ids 0 = pad, 1 = eos, byte b = b + 2 (258 in all)."""
    symbols = bytes_to_unicode()  # the printable character that byte-level BPE writes for each byte
    vocab = {PAD: 0, EOS: 1, **{symbols[byte]: byte + 2 for byte in range(256)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


# ---- models ---------------------------------------------------------------------------------------------------------


#: Names of sizes, and those of transformers.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
    "experts_per_token": "num_experts_per_tok",
}
_DEFAULTS = {
    "hidden_size": 128,
    "num_layers": 4,
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 512,
    "tie_word_embeddings": False,
}


def build_qwen2(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, **sizes: Any) -> Qwen2ForCausalLM:
    """Build a randomly initialised Qwen2 in float32 for `tokenizer`; the defaults make 0.6M parameters.

    The weights depend on the arguments only, and the global random state is left as it was. ``sizes``: those of
    `_DEFAULTS`, and other options of `Qwen2Config`. Raises `ValueError` when `hidden_size` is not divisible by
    `num_heads`, or `num_heads` by `num_kv_heads`.
    """
    return _build(Qwen2Config, Qwen2ForCausalLM, tokenizer, seed, {**_DEFAULTS, **sizes})


def build_qwen3_moe(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, **sizes: Any) -> Qwen3MoeForCausalLM:
    """Build a randomly initialised Qwen3 mixture of experts as [`build_qwen2`] does, with ``num_experts`` (8) of a
    quarter of `intermediate_size` in every layer and ``experts_per_token`` (2). The defaults make 1.0M parameters, of
    which a token uses 0.4M."""
    sizes = {**_DEFAULTS, "num_experts": 8, "experts_per_token": 2, "norm_topk_prob": True, **sizes}
    sizes["moe_intermediate_size"] = sizes["intermediate_size"] // 4
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_heads"]
    return _build(Qwen3MoeConfig, Qwen3MoeForCausalLM, tokenizer, seed, sizes)


def _build(config_class: type, model_class: type, tokenizer: PreTrainedTokenizerFast, seed: int, sizes: dict) -> Any:
    if sizes["hidden_size"] % sizes["num_heads"] or sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ValueError(
            "hidden_size must be divisible by num_heads and num_heads by num_kv_heads, got {hidden_size}, {num_heads}, "
            "{num_kv_heads}".format(**sizes)
        )
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    options = {_SIZES.get(name, name): value for name, value in sizes.items()}
    config = config_class(vocab_size=len(tokenizer), dtype=torch.float32, **options, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
    for key, value in special.items():
        setattr(model.generation_config, key, value)
    return model


#: Models that a recipe can make.
TINY_MODELS = {"qwen2": build_qwen2, "qwen3_moe": build_qwen3_moe}


# ---- supervised warm-up ---------------------------------------------------------------------------------------------


def encode_example(tokenizer: PreTrainedTokenizerFast, prompt: str | list[dict], completion: str) -> tuple[list, list]:
    """Return token ids of one training sequence (prompt, completion, eos), and its labels (the prompt ignored)."""
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    context = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    target = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [*context, *target], [_IGNORED] * len(context) + target


def supervised_warmup(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    dataset: Dataset,
    *,
    steps: int = 400,
    batch_size: int = 128,
    learning_rate: float = 5e-4,
    seed: int = 0,
    target_loss: float | None = None,
    progress: bool = True,
) -> float:
    """Train `model` in place on the reference completions of `dataset`: AdamW, cross-entropy on completion and eos.

    The learning rate rises linearly over 10 steps. Batches are drawn epoch by epoch without replacement. The
    global random state (Python, NumPy, torch) is set from `seed` on entry and on return, so the same seed gives the
    same weights bit for bit on the same machine.

    Args:
        dataset: the columns ``prompt`` (str or conversation) and ``completion`` (str) of a task.
        steps, batch_size: optimizer steps, and sequences in each of them.
        target_loss: stop before `steps` once the mean loss of the last 20 steps is at or below this, so that RL begins
            at the same level for any seed.
        progress: show a bar with the loss.

    Returns:
        The mean loss (nats per target token) of the last 20 steps.

    Raises `ValueError` for a sequence that is longer than the model's positions.
    """
    examples = []
    for row in dataset:
        ids, labels = encode_example(tokenizer, row["prompt"], row["completion"])
        examples.append({"input_ids": ids, "labels": labels})
    collate = DataCollatorForLanguageModeling(tokenizer.pad_token_id)
    longest = max(len(example["labels"]) for example in examples)
    limit = model.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"the longest sequence has {longest} tokens, the model has {limit} positions")
    set_seed(seed)
    order = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Adam's usual 0.999 would average over more steps than the warm-up has.
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    was_training = model.training
    queue: list[int] = []
    losses: list[float] = []
    model.train()
    with tqdm(total=steps, desc="warm-up", disable=not progress) as bar:
        for _ in range(steps):
            while len(queue) < batch_size:
                queue += torch.randperm(len(examples), generator=order).tolist()
            chosen = queue[:batch_size]
            queue = queue[batch_size:]
            batch = collate([examples[i] for i in chosen])
            loss = model(**{name: ids.to(model.device) for name, ids in batch.items()}, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
            window = losses[-20:]
            if target_loss is not None and len(window) == 20 and sum(window) <= target_loss * 20:
                break
    optimizer.zero_grad(set_to_none=True)
    model.train(was_training)
    set_seed(seed)
    return sum(window) / len(window)
