# SPDX-License-Identifier: Apache-2.0
"""What a quantized model looks like on disk."""

from .._lazy import lazy_names


_LAZY = {
    "add_evaluation": "card.model",
    "add_perplexity": "card.model",
    "atomic_folder": "io.atomic",
    "check_checkpoint": "io.validate",
    "check_local_index": "io.index",
    "check_unquantized": "io.validate",
    "checkpoint_step": "io.complete",
    "export": "convert.export",
    "import_checkpoint": "convert.importing",
    "invalidate": "io.complete",
    "last_complete_checkpoint": "io.complete",
    "make_record": "io.validate",
    "pack_checkpoint": "convert.pack_folder",
    "remove_scheme": "io.guard",
    "take_state_dict": "state_dict",
    "unguard": "io.guard",
    "verify_folder": "verify",
    "why_incomplete": "io.complete",
    "wrap_saving": "save",
    "write_whole_manifest": "io.complete",
}

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
