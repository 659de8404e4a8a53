# SPDX-License-Identifier: Apache-2.0
"""llama.cpp at work on token numbers, and what its own rounding does to a model."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn


BLOCK = 32


def compute(program: Path, file: Path, tokens: Sequence[int], new: int = 0) -> tuple[torch.Tensor, list[int]]:
    """llama.cpp's logits ``[tokens, vocabulary]``, and the tokens that greedy decoding adds."""
    out = file.with_suffix(".logits")
    command = [str(program), str(file), "logits", str(out), str(new), *map(str, tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    logits = torch.from_numpy(np.fromfile(out, np.float32)).view(len(tokens), -1)
    return logits, [int(word) for word in done.stdout.split()]


def tokenize(program: Path, file: Path, text: str) -> list[int]:
    """The tokens that llama.cpp makes of a text, special ones recognised and added as the file says."""
    done = subprocess.run([str(program), str(file), "tokenize", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def in_float32(file: Path, out: Path) -> Path:
    """The same values in float32: every tensor as the package `gguf` dequantizes it, metadata as they are."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@contextlib.contextmanager
def eight_bit_inputs(model: nn.Module) -> Iterator[None]:
    """Round inputs as llama.cpp's products with MXFP4 weights do (GGML's Q8_0: blocks of 32, a float16 scale of the
    largest over 127), those of the head to bfloat16, as of its own weights."""

    def rounded(module: nn.Module, arguments: tuple[torch.Tensor]) -> torch.Tensor:
        if module is model.lm_head:
            return arguments[0].bfloat16().float()
        blocks = arguments[0].unflatten(-1, (-1, BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        codes = torch.where(scale > 0, blocks / scale, torch.zeros(())).round()
        return (codes * scale.half().float()).flatten(-2)

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(rounded) for module in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of what was expected, each token's mean taken out of both."""
    found, expected = (x.float() - x.float().mean(-1, keepdim=True) for x in (found, expected))
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
