# SPDX-License-Identifier: Apache-2.0
"""Quantized models on disk: saving, loading, packing, export, import and verification."""

from ..utils import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "card": "add_evaluation auto_class choose_card decoration is_generated make_card read_generated save_card",
        "conversion": "ACTIONS ConversionReport LayerCost bits_per_weight import_checkpoint pack_checkpoint",
        "exports": "export",
        "folder": (
            "CheckpointError FileHeader ShardError StoredTensor model_dtype open_checkpoint read_header "
            "refuse_kernels tensors_by_name write_metadata"
        ),
        "formats": "FORMATS ImportableFormat",
        "formats.gguf": "to_blocks",
        "manifest": (
            "MANIFEST OnBytes Problem TRAINER_STATE Verification add_to_folder checkpoint_step ignore_bytes invalidate "
            "last_complete_checkpoint verify_folder weight_files why_incomplete write_manifest write_whole_manifest"
        ),
        "names": "FileNames Piece tied_weights",
        "save": "FolderError atomic_folder is_quantized own_names push staged take_state_dict wrap_saving",
        "scheme": "check_checkpoint check_unquantized make_record remove_scheme unguard",
        "sources": "ForeignSource LayerSource MasterSource PackedSource own_config",
    },
)
