# SPDX-License-Identifier: Apache-2.0
from .card import (
    add_evaluation as add_evaluation,
    auto_class as auto_class,
    choose_card as choose_card,
    decoration as decoration,
    is_generated as is_generated,
    make_card as make_card,
    read_generated as read_generated,
    save_card as save_card,
)
from .conversion import (
    ACTIONS as ACTIONS,
    ConversionReport as ConversionReport,
    LayerCost as LayerCost,
    bits_per_weight as bits_per_weight,
    import_checkpoint as import_checkpoint,
    pack_checkpoint as pack_checkpoint,
)
from .exports import export as export
from .folder import (
    CheckpointError as CheckpointError,
    FileHeader as FileHeader,
    ShardError as ShardError,
    StoredTensor as StoredTensor,
    checkpoint_step as checkpoint_step,
    model_dtype as model_dtype,
    open_checkpoint as open_checkpoint,
    read_header as read_header,
    refuse_kernels as refuse_kernels,
    tensors_by_name as tensors_by_name,
    write_metadata as write_metadata,
)
from .formats import FORMATS as FORMATS, ImportableFormat as ImportableFormat
from .formats.gguf import to_blocks as to_blocks
from .manifest import (
    MANIFEST as MANIFEST,
    OnBytes as OnBytes,
    Problem as Problem,
    TRAINER_STATE as TRAINER_STATE,
    Verification as Verification,
    add_to_folder as add_to_folder,
    ignore_bytes as ignore_bytes,
    invalidate as invalidate,
    last_complete_checkpoint as last_complete_checkpoint,
    verify_folder as verify_folder,
    weight_files as weight_files,
    why_incomplete as why_incomplete,
    write_manifest as write_manifest,
    write_whole_manifest as write_whole_manifest,
)
from .names import (
    FileNames as FileNames,
    Piece as Piece,
    kept_reasons as kept_reasons,
    saver_names as saver_names,
    tied_weights as tied_weights,
)
from .save import (
    FolderError as FolderError,
    atomic_folder as atomic_folder,
    is_quantized as is_quantized,
    own_names as own_names,
    push as push,
    staged as staged,
    take_state_dict as take_state_dict,
    wrap_saving as wrap_saving,
)
from .scheme import (
    check_checkpoint as check_checkpoint,
    check_unquantized as check_unquantized,
    make_record as make_record,
    remove_scheme as remove_scheme,
    stored_scheme as stored_scheme,
    unguard as unguard,
)
from .sources import (
    ForeignSource as ForeignSource,
    LayerSource as LayerSource,
    MasterSource as MasterSource,
    PackedSource as PackedSource,
    own_config as own_config,
)
