# SPDX-License-Identifier: Apache-2.0
"""How much memory a training step takes on each GPU, estimated from a model's config before anything is started.

States (weights, gradients, optimizer) follow from the number of elements. Activations, logits and the engines' buffers
are estimates; rollouts, which hold keys and values in place of activations, are not planned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..checkpoint import refuse_kernels
from ..config import MXFP4RLConfig
from ..gemm import GemmSpec
from ..model_structure import projections, weight_size
from ..module_names import find_layers
from .schemes import bits_per_element


#: How the model is spread over GPUs, each with an accelerate config in `recipes/accelerate`.
ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
#: Bytes of optimizer state for each trained element, with float32 masters.
OPTIMIZERS: Mapping[str, float] = {"adamw": 8, "adamw_8bit": 2, "sgd": 0}
_MASTER, _COMPUTE = 4, 2
#: DeepSpeed's defaults, in elements: its buffer for reduced gradients, and what stage 3 keeps gathered at most.
_REDUCE_BUCKET, _MAX_LIVE = 5e8, 1e9
#: Tokens whose logits TRL computes at a time.
_LOGIT_TOKENS = 1024


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
    layers; bytes that the backward pass needs of one token in one layer; widths of residual stream and logits."""

    elements: int
    quantized: int
    adapter: int
    layers: int
    saved: float
    hidden: int
    vocabulary: int


def read_config(model: str) -> PreTrainedConfig:
    """Return the config of a folder, a `config.json` or a hub id. Raises `ValueError` when there is none."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{model} has no config.json")
    source = path.parent if path.name == "config.json" else model
    try:
        options, _ = PreTrainedConfig.get_config_dict(source)
        refuse_kernels(options, model)
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{model!r} is no folder with a config.json, no such file, and no model that the Hub gives: {error}"
        ) from error


def sizes_of(config: PreTrainedConfig, quantization: MXFP4RLConfig | None) -> Sizes:
    """Measure a model that is built without memory.

    Raises `ValueError` when no causal language model belongs to the config, or nothing in it can be quantized.
    """
    config = type(config).from_dict({**config.to_dict(), "quantization_config": None})
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    text = config.get_text_config()
    skips = () if quantization is None else quantization.modules_to_not_convert or ()
    layers = find_layers(model, skips)[0]
    weights = {name: [p for p in layer.parameters() if p.dim() > 1] for name, layer in layers.items()}
    linears = [layer for layer in layers.values() if isinstance(layer, nn.Linear)]
    depth = text.num_hidden_layers
    return Sizes(
        elements=sum(parameter.numel() for parameter in model.parameters()),
        quantized=sum(weight.numel() for each in weights.values() for weight in each),
        adapter=sum(linear.in_features + linear.out_features for linear in linears),
        layers=depth,
        saved=_saved_bytes(layers, text, quantization) / depth,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
    )


def _saved_bytes(
    layers: Mapping[str, nn.Module], config: PreTrainedConfig, quantization: MXFP4RLConfig | None
) -> float:
    """Return bytes for one token in all decoder layers: what each linear layer keeps of its input, in 16 bits its
    output and what lies between the two halves of the MLP, in 32 bits the residual stream and its norms. Layers whose
    weights are frozen keep no input: of those that read the same one, the adapters share it."""
    is_packed = quantization is not None and quantization.mode == "packed"
    trains = quantization is not None and not is_packed
    spec = GemmSpec(quantization.gemms(), saved=quantization.saved_activations) if trains else None
    inputs, outputs, inner = {}, 0, 0
    experts_per_token = getattr(config, "num_experts_per_tok", 1) or 1
    for name, layer in layers.items():
        if isinstance(layer, nn.Linear):
            reader = name.rpartition(".")[0] if is_packed else name
            inputs[reader, layer.in_features] = _kept_bytes(layer.in_features, spec)
            outputs += layer.out_features
            inner = max(inner, layer.in_features)
            continue
        for projection in projections(layer):
            _, rows, columns = weight_size(layer, projection)
            inputs[name, projection] = experts_per_token * _kept_bytes(columns, spec)
            outputs += experts_per_token * rows
    depth = config.num_hidden_layers
    return sum(inputs.values()) + _COMPUTE * (outputs + inner * depth) + 16 * config.hidden_size * depth


def _kept_bytes(width: int, spec: GemmSpec | None) -> float:
    """Return bytes that a layer keeps of an input of ``width`` elements: E4M3 has a scale byte for a token."""
    if spec is not None and spec.saved == "mxfp4":
        return width * bits_per_element(spec.input_scheme) / 8
    return width + 1 if spec is not None and spec.saved == "fp8" else _COMPUTE * width


def plan(sizes: Sizes, setup: Setup) -> dict[str, float]:
    """Return bytes per GPU of each part of a training step. Raises `ValueError` for an unknown engine or optimizer."""
    for name, value, known in (("engine", setup.engine, ENGINES), ("optimizer", setup.optimizer, OPTIMIZERS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(known)}")
    packed = setup.quantization is not None and setup.quantization.mode == "packed"
    sharded = setup.engine in ("fsdp2", "zero3")
    trained = sizes.adapter * setup.lora_rank if packed else sizes.elements
    frozen = _packed_bytes(sizes, setup.quantization) + _COMPUTE * (sizes.elements - sizes.quantized) if packed else 0.0
    masters, gradients = _MASTER * trained, _MASTER * trained
    states = OPTIMIZERS[setup.optimizer] * trained
    share = setup.gpus if setup.engine != "ddp" else 1
    layer = (frozen if packed else _COMPUTE * sizes.elements) / sizes.layers
    buffers = {
        "ddp": gradients if setup.gpus > 1 else 0.0,
        "fsdp2": 2 * layer if setup.gpus > 1 else 0.0,
        "zero2": 2 * min(_REDUCE_BUCKET, trained),
        "zero3": 2 * min(_REDUCE_BUCKET, trained) + 2 * min(_MAX_LIVE, sizes.elements),
    }
    if setup.engine in ("zero2", "zero3"):  # all in 16 bits besides the masters, of which each GPU has a share
        frozen, gradients = frozen or _COMPUTE * sizes.elements, _COMPUTE * trained
    tokens = setup.batch * setup.length
    in_layers = (1 if setup.checkpointing else sizes.layers) * sizes.saved
    boundaries = sizes.layers * _COMPUTE * sizes.hidden if setup.checkpointing else 0
    return {
        "weights": frozen / (share if sharded else 1) + masters / share,
        "gradients": gradients / share,
        "optimizer": states / share,
        "copies of weights": 0.0 if packed or sharded else _COMPUTE * sizes.elements,  # in 16 bits, for the products
        "activations": tokens * (in_layers + boundaries),
        "logits": min(tokens, _LOGIT_TOKENS) * sizes.vocabulary * (_MASTER + _COMPUTE),
        "buffers of the engine": buffers[setup.engine],
    }


def fit(sizes: Sizes, setup: Setup, usable: float) -> dict[str, Any]:
    """Return the ``bytes`` of [`plan`], whether they fit into ``usable`` ones, and the largest batch that would."""
    parts, without = plan(sizes, setup), plan(sizes, replace(setup, batch=0))
    each = (parts["activations"] - without["activations"]) / setup.batch
    largest = int((usable - sum(parts.values()) + parts["activations"]) // each)
    return {"bytes": parts, "fits": sum(parts.values()) <= usable, "largest_batch": max(0, largest)}


def _packed_bytes(sizes: Sizes, quantization: MXFP4RLConfig | None) -> float:
    return 0.0 if quantization is None else sizes.quantized * bits_per_element(quantization.weight_scheme) / 8
