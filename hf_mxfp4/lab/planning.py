# SPDX-License-Identifier: Apache-2.0
"""How much memory a training step takes on each GPU, estimated from a model's config before anything is started.

States (weights, gradients, optimizer) follow from the number of elements. Activations, logits and the engines' buffers
are estimates; rollouts, which hold keys and values in place of activations, are not planned.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..checkpoint import refuse_kernels
from ..checkpoint.folder import CheckpointError, first_line, read_model_config
from ..config import MXFP4RLConfig
from ..model.layer_names import find_layers, split_linears
from ..model.plain_layers import is_linear, linear_size
from ..model.structure import projections, weight_size
from ..numerics import FP8
from ..ops import GemmSpec
from .errors.bits import bits_per_element


#: How the model is spread over GPUs, each with an accelerate config in `recipes/accelerate`.
ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
#: Bytes of optimizer state for each trained element, with float32 masters.
OPTIMIZERS: Mapping[str, float] = {"adamw": 8, "adamw_8bit": 2, "sgd": 0}
#: Bytes of an element in float32, as master weights have it, and in 16 bits, which products are computed in.
_MASTER = 4
_COMPUTE = 2
#: DeepSpeed's defaults, in elements: its buffer for reduced gradients, and what stage 3 keeps gathered at most.
_REDUCE_BUCKET = 5e8
_MAX_LIVE = 1e9
#: Tokens whose logits TRL computes at a time.
_LOGIT_TOKENS = 1024
#: Matrices of attention that exist for a moment besides those that are kept.
_PASSING = 3


@dataclass(frozen=True)
class Setup:
    """What is planned.

    Attributes:
        quantization: the scheme; `None` for full precision. Mode ``"packed"`` is LoRA on packed weights.
        engine: one of `ENGINES`.
        batch, length: sequences per GPU and pass, and tokens of each.
        optimizer: one of `OPTIMIZERS`.
        checkpointing: gradient checkpointing of every decoder layer.
        lora_rank: of the adapters on packed weights.
    """

    quantization: MXFP4RLConfig | None
    engine: str = "ddp"
    gpus: int = 1
    batch: int = 8
    length: int = 1024
    optimizer: str = "adamw"
    checkpointing: bool = True
    lora_rank: int = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: elements of all parameters, of those that are quantized, and of adapters of rank 1; decoder
    layers; bytes that the backward pass needs of one token, and of one pair of tokens where attention is computed in
    full, in one layer; widths of residual stream and logits."""

    elements: int
    quantized: int
    adapter: int
    layers: int
    saved: float
    pair: int
    hidden: int
    vocabulary: int


def read_config(model: str) -> PreTrainedConfig:
    """Return the config of a folder, a `config.json` or a hub id. Raises `ValueError` when there is none."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{model} has no config.json")
    source: str | Path = model
    if path.name == "config.json":
        source = path.parent
    try:
        options, _ = PreTrainedConfig.get_config_dict(source)
        refuse_kernels(options, model)
        return read_model_config(source, options, trust_remote_code=False)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{model!r} is no folder with a config.json, no such file, and no model that the Hub gives: {error}"
        ) from error


def sizes_of(config: PreTrainedConfig, quantization: MXFP4RLConfig | None, lora_experts: bool = False) -> Sizes:
    """Measure a model that is built without memory; ``lora_experts``: adapters are on experts and linear layers.

    Raises `ValueError` when no causal language model belongs to the config, or nothing in it can be quantized.
    """
    try:
        # The model is planned in the scheme that is asked for, whatever its checkpoint is stored in.
        config = type(config).from_dict({**config.to_dict(), "quantization_config": None})
        del config.quantization_config
        text = config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # classes of transformers fail in any way for numbers that make no sense
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"no model can be built from the config: {reason}") from error
    skips: Sequence[str] = ()
    if quantization is not None:
        skips = quantization.modules_to_not_convert or ()
    quantized = find_layers(model, skips)[0]
    layers = {**split_linears(model)[0], **quantized}
    matrices = {name: _matrices(layer) for name, layer in layers.items()}
    n_quantized = 0
    n_adapter = 0
    for name, layer in layers.items():
        for count, rows, columns in matrices[name]:
            if name in quantized:
                n_quantized += count * rows * columns
            if lora_experts or is_linear(layer):
                n_adapter += count * (rows + columns)
    depth = text.num_hidden_layers
    pair = 0
    if model.config._attn_implementation == "eager":
        pair = _COMPUTE * text.num_attention_heads
    return Sizes(
        elements=sum(parameter.numel() for parameter in model.parameters()),
        quantized=n_quantized,
        adapter=n_adapter,
        layers=depth,
        saved=_saved_bytes(layers, quantized, text, quantization) / depth,
        pair=pair,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
    )


def _matrices(layer: nn.Module) -> list[tuple[int, int, int]]:
    """Return ``(how many, N, K)`` of each weight of a linear layer or of experts."""
    if is_linear(layer):
        return [(1, *linear_size(layer))]
    return [weight_size(layer, projection) for projection in projections(layer)]


def _saved_bytes(
    layers: Mapping[str, nn.Module], quantized: Container[str], config: PreTrainedConfig, scheme: MXFP4RLConfig | None
) -> float:
    """Return bytes for one token in all decoder layers: what each linear layer keeps of its input, in 16 bits its
    output and what is between the two halves of the MLP, in 32 bits the residual stream and its norms."""
    is_packed = scheme is not None and scheme.mode == "packed"
    spec = None
    if scheme is not None and not is_packed:
        spec = GemmSpec(scheme.gemms())
    experts_per_token = getattr(config, "num_experts_per_tok", 1) or 1
    # Tensors between the two halves of an expert: one of SwiGLU, four of the clamped one of gpt-oss.
    between = 4 if hasattr(config, "swiglu_limit") else 1
    inputs: dict[Any, float] = {}
    outputs = 0
    inner = 0
    for name, layer in layers.items():
        spec_of_layer = spec if name in quantized else None
        if is_linear(layer):
            out_features, in_features = linear_size(layer)
            reader = name
            if is_packed:
                # A frozen layer keeps no input. Its adapter keeps it in 16 bits, together with those of the other
                # projections in the same module, which read the same input.
                reader = name.rpartition(".")[0]
            inputs[reader, in_features] = _kept_bytes(in_features, spec_of_layer)
            outputs += out_features
            # The widest input is that of the MLP's second half.
            inner = max(inner, in_features)
            continue
        for index, (_, rows, columns) in enumerate(_matrices(layer)):
            inputs[name, index] = experts_per_token * _kept_bytes(columns, spec_of_layer)
            outputs += experts_per_token * (rows + between * columns * index)
    depth = config.num_hidden_layers
    residual_stream = 16 * config.hidden_size * depth
    return sum(inputs.values()) + _COMPUTE * (outputs + inner * depth) + residual_stream


def _kept_bytes(width: int, spec: GemmSpec | None) -> float:
    """Return bytes that a layer keeps of an input of ``width`` elements: E4M3 has a scale for a token, in float32 where
    Wgrad multiplies the elements, otherwise a byte; MXFP8 has a byte for a block."""
    if spec is None or not spec.saves_fp8:
        return _COMPUTE * width
    if spec.input_scheme is FP8:
        return width + (4 if spec.folds_scales else 1)
    return width * bits_per_element(spec.input_scheme) / 8


def plan(sizes: Sizes, setup: Setup) -> dict[str, float]:
    """Return bytes per GPU of each part of a training step. Raises `ValueError` for an unknown engine or optimizer."""
    for name, value, known in (("engine", setup.engine, ENGINES), ("optimizer", setup.optimizer, OPTIMIZERS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(known)}")
    is_packed = setup.quantization is not None and setup.quantization.mode == "packed"
    is_sharded = setup.engine in ("fsdp2", "zero3")
    in_16_bits = _COMPUTE * sizes.elements

    # Weights: what is trained has float32 masters, what is frozen stays as it is stored. Products read copies in 16
    # bits; engines that shard weights gather them layer by layer instead.
    if is_packed:
        trained = sizes.adapter * setup.lora_rank
        bits = bits_per_element(setup.quantization.weight_scheme)
        frozen = sizes.quantized * bits / 8 + _COMPUTE * (sizes.elements - sizes.quantized)
        copies = 0.0
        layer = frozen / sizes.layers
    else:
        trained = sizes.elements
        frozen = 0.0
        copies = in_16_bits
        if is_sharded:
            copies = 0.0
        layer = in_16_bits / sizes.layers

    # Gradients, and the buffers that engines exchange them and gathered weights in.
    gradients = _MASTER * trained
    buffer = 0.0
    if setup.engine == "ddp" and setup.gpus > 1:
        buffer = gradients
    elif setup.engine == "fsdp2" and setup.gpus > 1:
        buffer = 2 * layer
    elif setup.engine == "zero2":
        buffer = 2 * min(_REDUCE_BUCKET, trained)
    elif setup.engine == "zero3":
        buffer = 2 * min(_REDUCE_BUCKET, trained) + 2 * min(_MAX_LIVE, sizes.elements)
    if setup.engine in ("zero2", "zero3"):
        # DeepSpeed has all in 16 bits besides the masters, of which each GPU has a share.
        frozen = frozen or in_16_bits
        gradients = _COMPUTE * trained

    # Activations: with checkpointing one layer is computed again at a time, and the others keep their inputs.
    tokens = setup.batch * setup.length
    if setup.checkpointing:
        alive = 1
        boundaries = sizes.layers * _COMPUTE * sizes.hidden
    else:
        alive = sizes.layers
        boundaries = 0
    in_layers = alive * sizes.saved + (alive + _PASSING) * sizes.pair * setup.length

    share = setup.gpus if setup.engine != "ddp" else 1
    share_of_frozen = share if is_sharded else 1
    return {
        "weights": frozen / share_of_frozen + _MASTER * trained / share,
        "gradients": gradients / share,
        "optimizer": OPTIMIZERS[setup.optimizer] * trained / share,
        "copies of weights": copies,
        "activations": tokens * (in_layers + boundaries),
        "logits": min(tokens, _LOGIT_TOKENS) * sizes.vocabulary * (_MASTER + _COMPUTE),
        "buffers of the engine": buffer,
    }


def fit(sizes: Sizes, setup: Setup, usable: float) -> dict[str, Any]:
    """Return the ``bytes`` of [`plan`], whether they fit into ``usable`` ones, and the largest batch that would."""
    parts = plan(sizes, setup)
    total = sum(parts.values())
    sequence = parts["activations"] / setup.batch
    largest = int((usable - total + parts["activations"]) // sequence)
    return {"bytes": parts, "fits": total <= usable, "largest_batch": max(0, largest)}
