# SPDX-License-Identifier: Apache-2.0
"""What devices cannot do."""

import torch


def widest_float(device: torch.device) -> torch.dtype:
    """The dtype to add many numbers up in: float64, or float32 on devices that have no other (Apple's GPUs)."""
    return torch.float32 if device.type == "mps" else torch.float64
