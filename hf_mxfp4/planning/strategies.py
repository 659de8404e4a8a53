# SPDX-License-Identifier: Apache-2.0
"""How engines spread a model over GPUs, and the bytes per GPU that follow from it."""

from dataclasses import dataclass

from .sizes import ModelSizes


#: Bytes per trained element that an optimizer keeps, where it is not two numbers in the dtype of the weights.
OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "sgd")
#: Blocks of bitsandbytes' 8-bit states: one float32 per state and block.
_STATE_BLOCK = 256
#: DeepSpeed's defaults, in elements: its buffer for reduced gradients, and what stage 3 keeps gathered at most.
_REDUCE_BUCKET = 5e8
_MAX_LIVE = 1e9


@dataclass(frozen=True)
class Strategy:
    """One way of training, with its accelerate config.

    Attributes:
        name: of the column.
        recipe: in `recipes/accelerate`.
        engine: ``"ddp"``, ``"fsdp2"``, ``"zero2"`` or ``"zero3"``.
        packed: whether adapters are trained on packed weights.
    """

    name: str
    recipe: str
    engine: str
    packed: bool = False


STRATEGIES = (
    Strategy("DDP", "ddp.yaml", "ddp"),
    Strategy("FSDP2", "fsdp2.yaml", "fsdp2"),
    Strategy("ZeRO-2", "zero2.yaml", "zero2"),
    Strategy("ZeRO-3", "zero3.yaml", "zero3"),
    Strategy("packed+LoRA, DDP", "ddp.yaml", "ddp", packed=True),
    Strategy("packed+LoRA, FSDP2", "fsdp2_lora.yaml", "fsdp2", packed=True),
)


def optimizer_bytes(optimizer: str, sizes: ModelSizes, element: float) -> float:
    """State of all trained parameters, ``element`` bytes each. Raises `ValueError` for an unknown optimizer."""
    if optimizer == "adamw":
        return 2 * element * sizes.trained_elements
    if optimizer == "adamw_8bit":
        return 2 * (1 + 4 / _STATE_BLOCK) * sizes.trained_elements
    if optimizer == "adafactor":
        return 4 * sizes.factors
    if optimizer == "sgd":
        return 0
    raise ValueError(f"optimizer={optimizer!r} is not known; choose one of {', '.join(OPTIMIZERS)}")


def state_parts(strategy: Strategy, sizes: ModelSizes, gpus: int, optimizer: str, compute: int) -> dict[str, float]:
    """Bytes per GPU of everything that does not depend on the batch, in a training step.

    Args:
        compute: bytes per element of the dtype that products are computed in.
    """
    element = sizes.trained / max(1, sizes.trained_elements)
    if strategy.engine in ("zero2", "zero3"):
        # DeepSpeed's bf16 engine: everything in 16 bits, and float32 masters and states in shares.
        stage3 = strategy.engine == "zero3"
        weights, gradients = 2 * sizes.elements, 2 * sizes.trained_elements
        return {
            "weights": weights / (gpus if stage3 else 1) + 4 * sizes.trained_elements / gpus,
            "gradients": gradients / gpus,
            "optimizer": optimizer_bytes(optimizer, sizes, 4) / gpus,
            "buffers of the engine": 2 * min(_REDUCE_BUCKET, sizes.trained_elements)
            + (2 * min(_MAX_LIVE, sizes.elements) if stage3 else 0),
        }
    states = optimizer_bytes(optimizer, sizes, element)
    if strategy.engine == "fsdp2":
        if strategy.packed:  # gathered as they are stored
            gathered = 2 * sizes.layer + sizes.outside
        else:  # in the dtype of products; of one layer the gradients too, before they are scattered
            gathered = compute * (3 * sizes.layer_elements + sizes.outside_elements)
        return {
            "weights": sizes.weights / gpus,
            "gradients": sizes.trained / gpus,
            "optimizer": states / gpus,
            "buffers of the engine": gathered if gpus > 1 else 0,
        }
    return {
        "weights": sizes.weights,
        "gradients": sizes.trained,
        "optimizer": states,
        # Its buckets are copies of the gradients, unless gradient_as_bucket_view is set.
        "buffers of the engine": sizes.trained if gpus > 1 else 0,
    }


def reference_bytes(strategy: Strategy, sizes: ModelSizes, gpus: int) -> float:
    """A frozen copy of the model; none with adapters, which are switched off instead."""
    if strategy.packed:
        return 0
    size = 2 * sizes.elements if strategy.engine in ("zero2", "zero3") else sizes.weights
    return size / gpus if strategy.engine in ("fsdp2", "zero3") else size
