# SPDX-License-Identifier: Apache-2.0
"""The step of layers that draw random numbers."""

from transformers import TrainerCallback

from ...layers import set_quantization_step


class QuantizationStepCallback(TrainerCallback):
    """Tells the layers that draw random numbers which step they are in, so that a resumed run repeats them.

    Raises `ValueError` at the first step of a model without such a layer.
    """

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        set_quantization_step(model, state.global_step)
