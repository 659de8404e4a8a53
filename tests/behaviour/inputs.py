# SPDX-License-Identifier: Apache-2.0
"""What all sections compute with: tensors, tiny models, a tokenizer. Of seeds and literals alone."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from ..tiny_models import make_model


#: Families of models, and what they have beside the options of all tiny models.
FAMILIES = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {"sliding_window": 8},
}


def generator(seed: int) -> torch.Generator:
    """A generator of the CPU."""
    return torch.Generator().manual_seed(seed)


def hard_matrix(rows: int = 64, columns: int = 320, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix with outliers, zeros (single, blocks, a row), subnormals, ties of E2M1, huge and special values."""
    x = torch.randn(rows, columns, generator=generator(0))
    x[::7, ::11] *= 40.0
    x[1, :64] = 0.0
    x[2] = 0.0
    x[3, :32] = torch.linspace(-6.0, 6.0, 32)
    x[4, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4) * torch.tensor([1.0, -1.0] * 16)
    x[5, :32] = torch.arange(32) * 1e-45
    x[6, :64] *= 1e-38
    x[7, :32] *= 1e36
    x[8, 5], x[9, 40], x[10, 70] = float("nan"), float("inf"), float("-inf")
    x[11] *= torch.logspace(-6, 6, columns)
    return x.to(dtype)


def token_ids(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Token ids ``[batch, length]``, none of them special."""
    return torch.randint(2, 32, (batch, length), generator=generator(seed))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ``0123456789+=``."""
    vocabulary = {text: number for number, text in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def save_base(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """Save a model of distinct numbers and the tokenizer in ``folder``, unless they are there; the folder."""
    if not folder.exists():
        model = make_model(family, **{**FAMILIES[family], **changes})
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                numbers = torch.randn(parameter.shape, generator=generator(number))
                parameter.copy_(1.0 + 0.1 * numbers if parameter.dim() == 1 else 0.15 * numbers)
        model.to(dtype).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return folder
