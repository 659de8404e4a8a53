# SPDX-License-Identifier: Apache-2.0
"""What a quantized model looks like on disk."""

from .._lazy import lazy_names
from .io.packed_files import check_packed_files
from .io.validate import check_checkpoint, make_record
from .save import wrap_saving
from .state_dict import take_state_dict


#: Conversions of whole checkpoints; imported on use, because nothing needs them to load or train a model.
_LAZY = {
    "add_evaluation": "card.model",
    "atomic_folder": "io.atomic",
    "export": "convert.export",
    "import_checkpoint": "convert.importing",
    "last_complete_checkpoint": "io.complete",
    "pack_checkpoint": "convert.pack",
    "why_incomplete": "io.complete",
}

__all__ = ["check_checkpoint", "check_packed_files", "make_record", "take_state_dict", "wrap_saving", *_LAZY]


__getattr__ = lazy_names(__name__, _LAZY)
