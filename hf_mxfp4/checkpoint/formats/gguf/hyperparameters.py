# SPDX-License-Identifier: Apache-2.0
"""Options of a model as metadata of a GGUF file, and back."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...io.folder import CheckpointError
from .architectures import Architecture, of_model


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: Frequencies of Llama 3's rotary embedding, which are a tensor in the file.
ROPE_FREQUENCIES = "rope_freqs.weight"
#: Key after `rope.scaling.` -> option of `rope_parameters`.
_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_ROPE_OPTIONS = {
    "default": {},
    "linear": {"factor": "factor"},
    "yarn": _YARN,
    "llama3": {},
}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
#: Of all Llama 3 checkpoints; a file says nothing of them, but has the frequencies that they give.
_LLAMA3_SHAPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def head_dim(config: "PreTrainedConfig") -> int:
    """Rows of each attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def unsupported_reason(config: "PreTrainedConfig") -> str | None:
    """Why llama.cpp does not compute a model of this config as transformers does; `None` if it does."""
    known = of_model(config.model_type)
    if known is None:
        return f"the architecture {config.model_type!r} is not one of llama, mixtral, qwen2, qwen3, qwen3_moe, gpt_oss"
    if (config.architectures or [known.model_class])[0] != known.model_class:
        return f"{config.architectures[0]} is no language model with a head ({known.model_class})"
    for name, values in {"hidden_act": ("silu",), **known.computes}.items():
        value = getattr(config, name, values[0])
        if value not in values:
            return f"llama.cpp computes {known.model_class} with {name}={values[0]!r} alone, not {value!r}"
    if known.name == "qwen2" and head_dim(config) * config.num_attention_heads != config.hidden_size:
        return "llama.cpp has no place for heads of Qwen2 that are not hidden_size / num_attention_heads wide"
    if known.name == "gpt-oss" and not _alternates(config.layer_types):
        return "llama.cpp takes layers of gpt-oss for sliding and full attention by turns"
    rope = rope_of(config)
    if rope["rope_type"] not in _ROPE_OPTIONS:
        return f"llama.cpp has no rotary embedding of the type {rope['rope_type']!r} for {known.name!r}"
    if rope["rope_type"] == "llama3" and known.model_type != "llama":
        return "scaled frequencies of Llama 3 are read for Llama alone"
    if extra := sorted(k for k in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(k) is not None):
        return f"rope_parameters has {extra[0]!r}, which is not written to GGUF files"
    return None


def _alternates(layer_types: list[str]) -> bool:
    return all(kind == ("full_attention" if i % 2 else "sliding_attention") for i, kind in enumerate(layer_types))


def rope_of(config: "PreTrainedConfig") -> dict[str, Any]:
    """`rope_parameters`, with the type in any case."""
    return {"rope_type": "default", **(config.rope_parameters or {})}


def rounds_ramp(config: "PreTrainedConfig") -> bool:
    """Whether llama.cpp's yarn differs from the model's, which does not round the bounds of its ramp (gpt-oss)."""
    rope = rope_of(config)
    return rope["rope_type"] == "yarn" and rope.get("truncate") is False


def write_options(architecture: Architecture, config: "PreTrainedConfig") -> dict[str, int | float | str]:
    """The metadata, by full keys."""
    values = {key: getattr(config, name, None) for key, name in architecture.options.items()}
    values = {key: head_dim(config) if architecture.options[key] == "head_dim" else v for key, v in values.items()}
    rope = rope_of(config)
    values["rope.freq_base"] = float(rope["rope_theta"])
    if scaling := _ROPE_OPTIONS[rope["rope_type"]]:
        values["rope.scaling.type"] = rope["rope_type"]
        floats = {key: rope.get(name) for key, name in scaling.items()}
        values |= {f"rope.scaling.{key}": v if key.startswith("orig") else _float(v) for key, v in floats.items()}
    return {f"{architecture.name}.{key}": value for key, value in values.items() if value is not None}


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def read_options(architecture: Architecture, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the config that the metadata of a file says. Raises [`CheckpointError`] for what has no equal."""
    prefix = f"{architecture.name}."
    own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    options = {name: own[key] for key, name in architecture.options.items() if key in own}
    options["rope_parameters"] = _read_rope(architecture, own)
    if "num_hidden_layers" not in options or "hidden_size" not in options:
        raise CheckpointError(f"the file says not how many layers the model has, or how wide they are ({prefix}...)")
    return options


def _read_rope(architecture: Architecture, own: Mapping[str, Any]) -> dict[str, Any]:
    kind = own.get("rope.scaling.type", "default")
    kind = "default" if kind == "none" else kind
    if not _ROPE_OPTIONS.get(kind) and kind != "default":
        raise CheckpointError(f"rope.scaling.type is {kind!r}; linear, yarn and none can be imported")
    scaling = {name: own.get(f"rope.scaling.{key}") for key, name in _ROPE_OPTIONS[kind].items()}
    given = {name: value for name, value in scaling.items() if value is not None}
    if kind == "yarn" and architecture.name == "gpt-oss":
        given["truncate"] = False  # of all gpt-oss checkpoints; a file says nothing of it
    return {"rope_type": kind, "rope_theta": own.get("rope.freq_base", 10000.0), **given}


def rope_frequencies(config: "PreTrainedConfig") -> torch.Tensor | None:
    """What Llama 3 divides each frequency of its rotary embedding by, float32 ``[head_dim / 2]``; `None` for any other
    rotary embedding."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    factor, low, high, context = (rope[name] for name in _LLAMA3)
    size = head_dim(config)
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    lengths = 2 * math.pi / frequencies
    smooth = (context / lengths - low) / (high - low)
    divisors = 1.0 / ((1.0 - smooth) / factor + smooth)
    divisors = torch.where(lengths < context / high, torch.ones(()), divisors)
    return torch.where(lengths > context / low, torch.tensor(float(factor)), divisors)


def read_rope_frequencies(frequencies: torch.Tensor, config: "PreTrainedConfig") -> dict[str, Any]:
    """The `rope_parameters` that give these divisors. Raises [`CheckpointError`] where none of Llama 3 do."""
    rope = {**rope_of(config), "rope_type": "llama3", **_LLAMA3_SHAPE, "factor": float(frequencies.max())}
    config.rope_parameters = rope
    if not torch.allclose(rope_frequencies(config), frequencies.flatten(), rtol=1e-5):
        raise CheckpointError(
            f"{ROPE_FREQUENCIES} is not that of Llama 3 models; put the model's config.json beside the file"
        )
    return rope
