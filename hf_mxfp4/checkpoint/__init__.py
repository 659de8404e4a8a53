# SPDX-License-Identifier: Apache-2.0
"""Quantized models on disk: saving, loading, packing, export, import and verification."""

from ..utils import lazy_names


_NAMES = {
    "atomic": ["FolderError", "atomic_folder", "staged"],
    "card": [
        "TAGS",
        "add_evaluation",
        "add_perplexity",
        "base_model_of",
        "choose_card",
        "decoration",
        "is_generated",
        "make_card",
        "read_generated",
        "save_card",
    ],
    "card_text": ["auto_class", "pipeline_tag"],
    "exports": ["export"],
    "folder": ["CheckpointError", "model_dtype", "open_checkpoint", "refuse_kernels"],
    "formats": ["FORMATS", "ImportableFormat"],
    "formats.gguf": ["to_blocks"],
    "hub": ["push"],
    "manifest": [
        "MANIFEST",
        "TRAINER_STATE",
        "checkpoint_step",
        "invalidate",
        "last_complete_checkpoint",
        "weight_files",
        "why_incomplete",
        "write_manifest",
        "write_whole_manifest",
    ],
    "pack": ["import_checkpoint", "pack_checkpoint"],
    "report": ["ConversionReport", "LayerCost", "bits_per_weight"],
    "save": ["is_quantized", "take_state_dict", "wrap_saving"],
    "scheme": ["check_checkpoint", "check_unquantized", "make_record", "remove_scheme", "unguard"],
    "sources": ["ForeignSource", "LayerSource", "MasterSource", "PackedSource", "own_config"],
    "tensor_names": ["FileNames", "Piece", "tied_weights"],
    "tensors": [
        "FileHeader",
        "ShardError",
        "StoredTensor",
        "read_header",
        "read_headers",
        "tensors_by_name",
        "write_metadata",
    ],
    "verify": ["Verification", "add_to_folder", "verify_folder"],
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
