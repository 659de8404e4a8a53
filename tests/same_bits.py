# SPDX-License-Identifier: Apache-2.0
"""Equality of nested states, tensors to the bit; the tensors of a model in memory or in a folder, and its logits."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_mxfp4 import MXFP4PackedLinear


#: Tokens that every tiny model has.
IDS = torch.arange(2, 14).view(2, 6)


def assert_same(a, b):
    """Equal types, keys, lengths and values throughout; NaN equals NaN."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def weights(model) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers that a model would save."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def shards(folder) -> list[Path]:
    """The safetensors files in a folder, in order."""
    return sorted(Path(folder).glob("*.safetensors"))


def tensors_in(folder) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in a folder."""
    found = {}
    for file in shards(folder):
        found.update(load_file(file))
    return found


def edit_config(folder, **changes) -> str:
    """Change entries of the `config.json` of a folder, which is returned."""
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder)


def layers_of(model, kind=MXFP4PackedLinear) -> dict[str, torch.nn.Module]:
    """The modules of a kind, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    """What a model in evaluation says of [`IDS`]."""
    return model.eval()(IDS).logits
