# SPDX-License-Identifier: Apache-2.0
"""What a quantized model looks like on disk."""

from .._lazy import lazy_names
from .packing import check_packed_files
from .saving import wrap_saving
from .state_dict import take_state_dict
from .validate import check_checkpoint, make_record


#: Conversions of whole checkpoints; imported on use, because nothing needs them to load or train a model.
_LAZY = {
    "add_evaluation": "model_card",
    "atomic_folder": "atomic",
    "export": "exporting",
    "import_checkpoint": "importing",
    "last_complete_checkpoint": "complete",
    "pack_checkpoint": "pack_folder",
    "why_incomplete": "complete",
}

__all__ = ["check_checkpoint", "check_packed_files", "make_record", "take_state_dict", "wrap_saving", *_LAZY]


__getattr__ = lazy_names(__name__, _LAZY)
