# SPDX-License-Identifier: Apache-2.0
"""What a quantized model looks like on disk."""

from .state_dict import forward_state_dict, take_state_dict


__all__ = ["forward_state_dict", "take_state_dict"]
