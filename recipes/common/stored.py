# SPDX-License-Identifier: Apache-2.0
"""What a folder or a repository of the Hub holds: whole weights or an adapter, and under which scheme."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.config import QUANT_METHOD


@dataclass(frozen=True)
class Stored:
    """A model as it is stored.

    Attributes:
        weights: folder or Hub id of the whole weights; of an adapter, those of its base.
        revision: of these weights.
        config: of these weights.
        adapter: the configuration of an adapter, otherwise `None`.
        adapter_folder: where it was found; in the cache of the Hub it has the name of the commit.
        quantization: how the checkpoint of the whole weights is quantized, by any method.
        scheme: that of this package which the weights or else the adapter carry.
    """

    weights: str
    revision: str | None
    config: PretrainedConfig
    adapter: dict[str, Any] | None
    adapter_folder: Path | None
    quantization: Any
    scheme: MXFP4RLConfig | None


def read_stored(
    source: str, *, revision: str | None = None, base: str | None = None, trust_remote_code: bool = False
) -> Stored:
    """Read the configurations of a model, and no weights.

    Args:
        source: folder or Hub id.
        base: what an adapter belongs on, instead of the model that its configuration names.

    Raises:
        OSError: there is nothing to load.
        ValueError: a base for what is no adapter, or an adapter that names none.
    """
    if (source.startswith((".", "/")) or source.count("/") > 1) and not Path(source).is_dir():
        raise FileNotFoundError(f"cannot load the model {source!r}: there is no such folder")
    file = find_adapter_config_file(source, revision=revision)
    adapter = None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    if adapter is None and base is not None:
        raise ValueError(f"{source} is no adapter, so it takes no base ({base})")
    weights = source if adapter is None else base or adapter.get("base_model_name_or_path")
    if not weights:
        raise ValueError(
            f"the adapter {source} names no base; name it in adapter_config.json, or with --base of evaluate.py"
        )
    if adapter is not None:
        revision = None if base else adapter.get("revision")
    config = AutoConfig.from_pretrained(weights, revision=revision, trust_remote_code=trust_remote_code)
    quantization = getattr(config, "quantization_config", None)
    return Stored(
        weights=weights,
        revision=revision,
        config=config,
        adapter=adapter,
        adapter_folder=None if file is None else Path(file).parent,
        quantization=quantization,
        scheme=_scheme(quantization or (adapter or {}).get("base_quantization")),
    )


def is_adapter(model: Any) -> bool:
    """Whether TRL's `ModelConfig` names an adapter."""
    return find_adapter_config_file(model.model_name_or_path, revision=model.model_revision) is not None


def method(quantization: Any) -> str | None:
    """The name of a quantization method."""
    found = quantization.get if isinstance(quantization, dict) else lambda name: getattr(quantization, name, None)
    return found("quant_method")


def load_tokenizer(
    source: str, stored: Stored, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer saved with an adapter, or else that of its base."""
    own = Path(source)
    places = [(source, revision), (stored.weights, stored.revision)]
    if own.is_dir() and not (own / "tokenizer_config.json").is_file():
        places = places[1:]
    for place, of in places:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                place, revision=of, padding_side="left", trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError):
            if place == places[-1][0]:
                raise
            continue
        break
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _scheme(quantization: Any) -> MXFP4RLConfig | None:
    if not quantization or method(quantization) != QUANT_METHOD:
        return None
    return quantization if isinstance(quantization, MXFP4RLConfig) else MXFP4RLConfig.from_dict(quantization)
