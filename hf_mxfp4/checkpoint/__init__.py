# SPDX-License-Identifier: Apache-2.0
"""Quantized models on disk: saving, loading, packing, export, import and verification."""

from ..utils import lazy_names


_NAMES = {
    "atomic": "FolderError atomic_folder staged",
    "card": "add_evaluation auto_class choose_card decoration is_generated make_card read_generated save_card",
    "conversion": "ConversionReport LayerCost bits_per_weight import_checkpoint pack_checkpoint",
    "exports": "export",
    "folder": "CheckpointError model_dtype open_checkpoint refuse_kernels",
    "formats": "FORMATS ImportableFormat",
    "formats.gguf": "to_blocks",
    "manifest": (
        "MANIFEST TRAINER_STATE Verification add_to_folder checkpoint_step invalidate last_complete_checkpoint "
        "verify_folder weight_files why_incomplete write_manifest write_whole_manifest"
    ),
    "names": "FileNames Piece tied_weights",
    "save": "is_quantized push take_state_dict wrap_saving",
    "scheme": "check_checkpoint check_unquantized make_record remove_scheme unguard",
    "sources": "ForeignSource LayerSource MasterSource PackedSource own_config",
    "tensors": "FileHeader ShardError StoredTensor read_header read_headers tensors_by_name write_metadata",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
