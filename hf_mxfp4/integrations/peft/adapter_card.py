# SPDX-License-Identifier: Apache-2.0
"""The card of an adapter on a quantized base, in the place of the empty one that PEFT writes."""

import functools
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig, PeftModel
from torch import nn

from ..._logging import get_logger
from ...checkpoint.card import CARD, TAGS, base_model_of, decoration, is_generated, read_card, signed_card
from ...checkpoint.card_text import HERE, INSTALLATION, auto_class, code
from ...config import MXFP4RLConfig
from .merge.merge_cost import LOSSY_DB, merge_cost


_TITLE = "# LoRA adapter for "
#: What PEFT adds to a card each time it saves.
_VERSIONS = re.compile(r"\s*^### Framework versions\n\n(?:- PEFT \S+\s*)+\Z", re.MULTILINE)
_NO_EVALUATION = "No evaluation came with this adapter: nothing is claimed about its quality on any task."


@dataclass
class Base:
    """What the card says of the model below an adapter, known when it is attached.

    Attributes:
        adapter: the adapter's name.
        architecture: the class of the model.
        stored: whether the files of the base have the scheme in them.
        n_quantized: linear maps in MXFP4; `None` where nobody counted.
        bits_per_weight: of packed weights.
    """

    adapter: str
    architecture: str
    stored: bool
    n_quantized: int | None
    bits_per_weight: float | None
    _model: weakref.ref | None = None

    @classmethod
    def of(cls, model: nn.Module, adapter: str) -> "Base":
        report = getattr(model, "quantization_report", None)
        return cls(
            adapter,
            type(model).__name__,
            bool(getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False)),
            None if report is None else report.n_quantized,
            None if report is None else report.bits_per_weight,
            weakref.ref(model),
        )

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as it is there; copies of this have none."""
        return None if self._model is None else self._model()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}


def keep_weights_without_a_card() -> None:
    """Have [`PeftModel.save_pretrained`], which writes its card before the weights, go on where that fails."""
    original = PeftModel.create_or_update_model_card
    if getattr(original, "is_decoration", False):
        return

    @functools.wraps(original)
    def create_or_update_model_card(self: PeftModel, output_dir: str) -> None:
        with decoration():
            original(self, output_dir)

    create_or_update_model_card.is_decoration = True
    PeftModel.create_or_update_model_card = create_or_update_model_card


def write_adapter_card(config: LoraConfig, base: Base, folder: Path) -> None:
    """Put a card in the place of PEFT's empty one, or of an older generated one, for an adapter saved to ``folder``.

    A card that somebody wrote or edited stays, and where PEFT wrote none there will be none.
    """
    with decoration():
        _write(config, base, folder)


def _write(config: LoraConfig, base: Base, folder: Path) -> None:
    for place, subfolder in ((folder, None), (folder.parent, folder.name if folder.name == base.adapter else None)):
        if place != folder and subfolder is None:
            continue
        path = place / CARD
        if path.is_file():
            card = read_card(path.read_text(encoding="utf-8", errors="replace"))
            if card is not None and _is_replaceable(card):
                data = _metadata(card.data, config)
                signed_card(data, _text(config, base, data.base_model, subfolder)).save(path)
            return


def _is_replaceable(card: ModelCard) -> bool:
    body = _VERSIONS.sub("", card.text)
    if body.strip().startswith(_TITLE):
        return is_generated(f"---\n{card.data.to_yaml()}\n---\n\n{body}")
    empty = ModelCard.from_template(ModelCardData()).text
    return _VERSIONS.sub("", body).split() == _VERSIONS.sub("", empty).split()


def _metadata(data: ModelCardData, config: LoraConfig) -> ModelCardData:
    """That which PEFT wrote, with the tags of the package and without names that only this machine knows."""
    base_model = base_model_of(config.base_model_name_or_path or "")
    tags = [tag for tag in data.tags or () if not tag.startswith("base_model:")]
    data.base_model = base_model
    data.tags = list(dict.fromkeys([*tags, *TAGS, *([f"base_model:adapter:{base_model}"] if base_model else [])]))
    return data


def _text(config: LoraConfig, base: Base, base_model: str | None, subfolder: str | None) -> str:
    scheme = MXFP4RLConfig.from_dict(config.base_quantization)
    return "\n\n".join(
        [
            f"{_TITLE}{base_model or base.architecture} in MXFP4",
            f"Low-rank adapters in full precision beside the weights of a frozen `{base.architecture}` whose linear "
            "layers compute in MXFP4, by hf-mxfp4 and PEFT.",
            _loading(base, scheme, base_model, subfolder),
            _adapter(config, base, scheme, base_model),
            _merging(base, scheme),
            f"## Evaluation\n\n{_NO_EVALUATION}",
        ]
    )


def _loading(base: Base, scheme: MXFP4RLConfig, base_model: str | None, subfolder: str | None) -> str:
    auto = auto_class(base.architecture)
    how = "" if base.stored else f",\n    quantization_config=hf_mxfp4.{_constructor(scheme)}\n"
    name = f'"{base_model or "<the base model>"}"'
    call = name if base.stored else f"\n    {name}{how}"
    place = f'"{HERE}"' + (f', subfolder="{subfolder}"' if subfolder else "")
    return (
        "## How to load\n\n```python\nimport hf_mxfp4\nfrom peft import PeftModel\n"
        f"from transformers import {auto}\n\nbase = {auto}.from_pretrained({call})\n"
        f"model = PeftModel.from_pretrained(base, {place})\n```\n\n"
        f"hf-mxfp4 has no release yet: {INSTALLATION}. On a base of another scheme, or in full precision, the adapter "
        "gives other outputs, and a warning names both schemes."
    )


def _constructor(scheme: MXFP4RLConfig) -> str:
    """The scheme as code, options at their defaults left out."""
    options, usual = scheme.to_dict(), MXFP4RLConfig(mode=scheme.mode).to_dict()
    given = [f"{key}={value!r}" for key, value in options.items() if key not in usual or usual[key] != value]
    mode = [] if scheme.mode == MXFP4RLConfig().mode else [f"mode={scheme.mode!r}"]
    return f"MXFP4RLConfig({', '.join(mode + given)})"


def _adapter(config: LoraConfig, base: Base, scheme: MXFP4RLConfig, base_model: str | None) -> str:
    targets = config.target_modules or ()
    named = [targets] if isinstance(targets, str) else sorted(targets)
    named += sorted(config.target_parameters or ())
    rows = {
        "base model": f"`{base_model}`" if base_model else f"a `{base.architecture}` that is no Hub repository",
        "mode of the base": f"`{scheme.mode}`",
        "preset": f"`{scheme.preset}`",
        "scheme": f"`{scheme.describe()}`",
    }
    if base.bits_per_weight is not None:
        rows["bits per quantized weight"] = f"{base.bits_per_weight:.4g}"
    elif scheme.mode == "qat":
        rows["bits per quantized weight"] = "those of the checkpoint: weights are quantized as the model computes"
    if base.n_quantized is not None:
        rows["quantized linear maps"] = str(base.n_quantized)
    alpha = f"{config.lora_alpha:g}{', rsLoRA' if config.use_rslora else ''}"
    rows |= {"rank": str(config.r), "alpha": alpha, "targets": ", ".join(map(code, named))}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"## Adapter and base\n\n| | |\n|---|---|\n{table}"


def _merging(base: Base, scheme: MXFP4RLConfig) -> str:
    try:
        measured = None if base.model is None else merge_cost(base.model, base.adapter)
    except (RuntimeError, ValueError) as error:  # a checkpoint is not lost for a number on its card
        get_logger().warning("what merging would cost is not measured for the adapter's card: %s", error)
        measured = None
    if measured is None:
        words = "Not measured when this adapter was saved."
    elif measured.total.update == 0:
        words = "When this adapter was saved it changed nothing yet."
    else:
        words = (
            f"Measured on sampled rows of {len(measured.layers)} layers when this adapter was saved: a merge would "
            "keep its change of the weights at a signal to quantization noise ratio of "
            f"{measured.total.update_sqnr_db:.1f} dB. Below {LOSSY_DB:.0f} dB part of what was trained is lost, below "
            "0 dB most."
        )
    into = "packs" if scheme.mode == "packed" else "quantizes"
    return (
        f"## Merging\n\n`merge_and_unload()` {into} the sum of weight and adapter again. {words} Nothing is lost by "
        'keeping the adapter beside its base; `hf_mxfp4.merge_adapters(model, into="bf16")` rounds the sum to 16 bits '
        "alone."
    )
