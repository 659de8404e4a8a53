# SPDX-License-Identifier: Apache-2.0
"""transformers' tables of quantization methods, imported without what torchao says of its own parts on the way.

transformers imports torchao, where that is installed, together with these tables. torchao then warns of each of its GPU
libraries that does not fit this machine, and torch of what torchao registers; neither says anything about a run here.
"""

import contextlib
import logging
from collections.abc import Iterator


#: Logger to what its messages contain that are not shown.
_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass"}


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    filters = {name: lambda record, text=text: text not in record.getMessage() for name, text in _NOISE.items()}
    for name, keep in filters.items():
        logging.getLogger(name).addFilter(keep)
    try:
        yield
    finally:
        for name, keep in filters.items():
            logging.getLogger(name).removeFilter(keep)


with _without_noise():
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer


__all__ = [
    "AUTO_QUANTIZATION_CONFIG_MAPPING",
    "AUTO_QUANTIZER_MAPPING",
    "HfQuantizer",
    "register_quantization_config",
    "register_quantizer",
]
