# SPDX-License-Identifier: Apache-2.0
"""Whether training left frozen weights alone."""

import hashlib

import torch
from torch import nn


def frozen_checksum(model: nn.Module) -> str:
    """SHA-256 of the names and bytes of all parameters that are not trained."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(name.encode())
            tensor = parameter.detach()
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
