# SPDX-License-Identifier: Apache-2.0
"""The scheme of the base in an adapter's files: in `adapter_config.json`, compared on loading, and in the card."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig
from torch import nn

from ..._logging import get_logger
from ...checkpoint import TAGS, auto_class, base_model_of, decoration
from ...config import MXFP4RLConfig


#: What PEFT appends to a card each time it saves.
_VERSIONS = re.compile(r"\s*^### Framework versions\n\n(?:- PEFT \S+\s*)+\Z", re.MULTILINE)


@dataclass
class MXFP4LoraConfig(LoraConfig):
    """[`peft.LoraConfig`] of an adapter on a quantized base; `adapter_config.json` holds the base's scheme too.

    There is no need to write one: a [`peft.LoraConfig`] becomes one when its adapter is attached to a quantized model.
    Without hf_mxfp4, PEFT reads the file as well, and warns of the additional entry. Saving an adapter also replaces
    PEFT's empty card.
    """

    # No field, so not saved: the adapter's name, its base's class, and whether the base's files have the scheme.
    _base = None

    base_quantization: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "The MXFP4RLConfig of the model that the adapter was trained on, as in its config.json."},
    )

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """[`peft.LoraConfig.save_pretrained`], which PEFT calls when it saves an adapter, after it wrote a card."""
        super().save_pretrained(save_directory, **kwargs)
        if self._base is not None and self.base_quantization is not None:
            with decoration():
                write_adapter_card(self, Path(save_directory), *self._base)


def base_scheme(model: nn.Module) -> MXFP4RLConfig | None:
    """Return the scheme of a model that was quantized by this package, otherwise `None`."""
    scheme = getattr(getattr(model, "config", None), "quantization_config", None)
    return scheme if isinstance(scheme, MXFP4RLConfig) else None


def record_base(config: LoraConfig, model: nn.Module, adapter_name: str) -> None:
    """Note the scheme of ``model`` in ``config``, in place.

    When ``config`` already names one that computes other values, as that of an adapter being loaded may, a warning
    names both. An adapter loaded for inference keeps what it has; one that is to be trained gets that of ``model``.
    """
    found = base_scheme(model)
    if found is not None:
        is_stored = bool(getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False))
        config._base = adapter_name, type(model).__name__, is_stored
    stored = getattr(config, "base_quantization", None)
    if stored is not None:
        _compare(adapter_name, stored, found)
        if config.inference_mode:
            return
    if found is not None and type(config) is LoraConfig:
        # In place, because PEFT holds several references to this object and reads from each of them.
        config.__class__ = MXFP4LoraConfig
    if isinstance(config, MXFP4LoraConfig):
        config.base_quantization = None if found is None else found.to_dict()


def _compare(adapter_name: str, stored: dict[str, Any], found: MXFP4RLConfig | None) -> None:
    try:
        trained = MXFP4RLConfig.from_dict(stored)
    except (TypeError, ValueError) as error:
        get_logger().warning(
            "adapter %r names a quantization scheme of its base that cannot be read: %s", adapter_name, error
        )
        return
    if found is not None and _values(found) == _values(trained):
        return
    get_logger().warning(
        "adapter %r was made for a base quantized as %s, and is now attached to one %s: expect other outputs, or "
        "load the base with the adapter's scheme",
        adapter_name,
        _describe(trained),
        "in full precision" if found is None else f"quantized as {_describe(found)}",
    )


def _values(scheme: MXFP4RLConfig) -> tuple:
    """Return what a scheme's values depend on: packed and trainable models of the same scheme compute alike."""
    return scheme.gemms().fprop, frozenset(scheme.modules_to_not_convert or ())


def _describe(scheme: MXFP4RLConfig) -> str:
    names = scheme.modules_to_not_convert
    return scheme.describe() + (f" without {', '.join(names)}" if names else "")


# ---- the card -------------------------------------------------------------------------------------------------------


def write_adapter_card(config: MXFP4LoraConfig, folder: Path, adapter: str, architecture: str, is_stored: bool) -> None:
    """Replace PEFT's empty card of an adapter that was saved to ``folder``; any other card stays.

    Args:
        adapter: its name; PEFT saves one that is not called ``"default"`` to a folder of that name beside the card.
        architecture: the class of the base.
        is_stored: whether the base's own files have the scheme.
    """
    path = (folder if adapter == "default" else folder.parent) / "README.md"
    if not path.is_file():
        return
    card, empty = ModelCard.load(path), ModelCard.from_template(ModelCardData())
    if _VERSIONS.sub("", card.text).split() != _VERSIONS.sub("", empty.text).split():
        return
    base = base_model_of(config.base_model_name_or_path or "")
    tags = [tag for tag in card.data.tags or () if not tag.startswith("base_model:")]
    card.data.base_model = base
    card.data.tags = list(dict.fromkeys([*tags, *TAGS, *([f"base_model:adapter:{base}"] if base else [])]))
    card.text = _card_text(config, base or "<the base model>", adapter, architecture, is_stored)
    card.save(path)


def _card_text(config: MXFP4LoraConfig, base: str, adapter: str, architecture: str, is_stored: bool) -> str:
    scheme, auto = MXFP4RLConfig.from_dict(config.base_quantization), auto_class(architecture)
    scheme_argument = "" if is_stored else f", quantization_config=hf_mxfp4.{_constructor(scheme)}"
    subfolder = "" if adapter == "default" else f', subfolder="{adapter}"'
    named = [config.target_modules] if isinstance(config.target_modules, str) else sorted(config.target_modules or ())
    targets = ", ".join(f"`{name}`" for name in [*named, *sorted(config.target_parameters or ())])
    return f"""# LoRA adapter for {base if "<" not in base else architecture} in MXFP4

Low-rank adapters in full precision (rank {config.r}, alpha {config.lora_alpha:g}, on {targets}) for a frozen
`{architecture}` whose linear layers compute in MXFP4: `{scheme.describe()}`, mode `{scheme.mode}`.

## How to load

```python
import hf_mxfp4
from peft import PeftModel
from transformers import {auto}

base = {auto}.from_pretrained("{base}"{scheme_argument})
model = PeftModel.from_pretrained(base, "<this repository or folder>"{subfolder})
```

On a base of another scheme, or in full precision, the adapter gives other outputs. `merge_and_unload()` quantizes the
sum again and reports what that costs; `hf_mxfp4.merge_adapters(model, into="bf16")` rounds it to 16 bits.

## Evaluation

No evaluation came with this adapter: nothing is claimed about its quality on any task.
"""


def _constructor(scheme: MXFP4RLConfig) -> str:
    """Return the scheme as code, without options at their defaults."""
    options, usual = scheme.to_dict(), MXFP4RLConfig(mode=scheme.mode).to_dict()
    given = [f"{key}={value!r}" for key, value in options.items() if key not in usual or usual[key] != value]
    mode = [] if scheme.mode == MXFP4RLConfig().mode else [f"mode={scheme.mode!r}"]
    return f"MXFP4RLConfig({', '.join(mode + given)})"
