# SPDX-License-Identifier: Apache-2.0
"""A model in full precision that computes under one scheme after another, on one set of weights."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from ...config import MXFP4RLConfig
from ...layers import QUANTIZED, TRAINABLE
from ...report import master_sqnr


def for_evaluation(config: MXFP4RLConfig) -> MXFP4RLConfig:
    """The same forward product on master weights that nothing moves: trainable layers have the numbers of packed ones,
    and a checkpoint is measured with the very numbers that it has."""
    if config.mode == "qat" and not config.dither_ties:
        return config
    seed = config.stochastic_seed if config.gemms().is_random else 0
    return replace(config, mode="qat", dither_ties=False, stochastic_seed=seed)


@contextlib.contextmanager
def swapped(model: nn.Module, config: MXFP4RLConfig) -> Iterator[float | None]:
    """Within this context the layers that ``config`` matches compute under its scheme, on the very weights of
    ``model``; afterwards they are the plain layers that they were. What `from_pretrained` would have made of the same
    files has the same bits.

    Gives the signal to quantization noise ratio of the weights in decibels, as `quantization_report` has it.

    Raises `ValueError` for a model that is quantized already, and where the config matches nothing.
    """
    from transformers.quantizers.auto import AutoHfQuantizer  # it imports every quantization library there is

    if any(isinstance(module, QUANTIZED) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is quantized; schemes are put on a model in full precision")
    before = dict(model.named_modules(remove_duplicate=False))
    attributes = {name: model.__dict__.get(name, _ABSENT) for name in _SET_BY_TRANSFORMERS}
    # As transformers does it, which knows the quantizer.
    AutoHfQuantizer.from_config(for_evaluation(config)).preprocess_model(model)
    try:
        if not any(isinstance(module, TRAINABLE) for module in model.modules()):
            raise ValueError(f"{config.describe()} quantizes no layer of {type(model).__name__}")
        yield master_sqnr(model)
    finally:
        for name, module in before.items():
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        for name, value in attributes.items():
            model.__dict__.pop(name, None)
            if value is not _ABSENT:
                setattr(model, name, value)


_SET_BY_TRANSFORMERS = ("is_quantized", "quantization_method")
_ABSENT = object()
