# SPDX-License-Identifier: Apache-2.0
"""Whether training left frozen weights alone."""

import hashlib

import torch
from torch import nn

from hf_mxfp4.layers import gathered


def frozen_checksum(model: nn.Module) -> str:
    """SHA-256 of the names and bytes of all parameters that are not trained. Of sharded ones each is gathered, so all
    processes must call it."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(name.encode())
            with gathered(parameter) as tensor:
                # A copy: memory that numpy has seen can no longer be resized, as FSDP does.
                digest.update(tensor.flatten().view(torch.uint8).cpu().clone().numpy())
    return digest.hexdigest()
