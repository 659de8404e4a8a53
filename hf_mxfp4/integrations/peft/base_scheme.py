# SPDX-License-Identifier: Apache-2.0
"""The quantization scheme of the base, carried in an adapter's configuration and compared when it is loaded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import LoraConfig
from torch import nn

from ..._logging import get_logger
from ...config import MXFP4RLConfig
from .adapter_card import Base, write_adapter_card


@dataclass
class MXFP4LoraConfig(LoraConfig):
    """[`peft.LoraConfig`] of an adapter on a quantized base; `adapter_config.json` holds the base's scheme too.

    There is no need to write one: a [`peft.LoraConfig`] becomes one when its adapter is attached to a quantized model.
    Without hf_mxfp4, PEFT reads the file as well, and warns of the additional entry. Saving an adapter also puts a card
    in the place of PEFT's empty one.
    """

    _base = None  # no field: it is not saved

    base_quantization: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "The MXFP4RLConfig of the model that the adapter was trained on, as in its config.json."},
    )

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """[`peft.LoraConfig.save_pretrained`], which PEFT calls when it saves an adapter, after it wrote a card."""
        super().save_pretrained(save_directory, **kwargs)
        if self._base is not None and self.base_quantization is not None:
            write_adapter_card(self, self._base, Path(save_directory))


def base_scheme(model: nn.Module) -> MXFP4RLConfig | None:
    """The scheme of a model that was quantized by this package, otherwise `None`."""
    scheme = getattr(getattr(model, "config", None), "quantization_config", None)
    return scheme if isinstance(scheme, MXFP4RLConfig) else None


def record_base(config: LoraConfig, model: nn.Module, adapter_name: str) -> None:
    """Note the scheme of ``model`` in ``config``, in place.

    When ``config`` already names one that computes other values, as that of an adapter being loaded may, a warning
    names both. An adapter loaded for inference keeps what it has; one that is to be trained gets that of ``model``.
    """
    found = base_scheme(model)
    if found is not None and isinstance(config, LoraConfig):
        config._base = Base.of(model, adapter_name)
    stored = getattr(config, "base_quantization", None)
    if stored is not None:
        _compare(adapter_name, stored, found)
        if config.inference_mode:
            return
    if found is not None and type(config) is LoraConfig:
        # In place, because PEFT holds several references to this object and reads from each of them.
        config.__class__ = MXFP4LoraConfig
    elif found is not None and not isinstance(config, MXFP4LoraConfig):
        get_logger().warning(
            "adapter %r has a config of the class %s, which cannot carry the scheme of its base; derive it from "
            "hf_mxfp4.integrations.peft.MXFP4LoraConfig",
            adapter_name,
            type(config).__name__,
        )
        return
    if found is not None or stored is not None:
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
    """What a scheme's values depend on: a packed model and a trainable one of the same scheme compute alike."""
    return scheme.gemms().fprop, frozenset(scheme.modules_to_not_convert or ())


def _describe(scheme: MXFP4RLConfig) -> str:
    names = scheme.modules_to_not_convert
    return scheme.describe() + (f" without {', '.join(names)}" if names else "")
