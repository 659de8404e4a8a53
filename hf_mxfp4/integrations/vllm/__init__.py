# SPDX-License-Identifier: Apache-2.0
"""vLLM loads checkpoints of this package: the entry point `vllm.general_plugins` names [`register`]. The names below
need no vLLM."""

from ...utils import lazy_names


__all__ = [
    "SETTINGS_KEY",
    "EngineSettings",
    "ExpectedLayers",
    "WeightConverter",
    "add_adapters",
    "experts_operator",
    "make_room",
    "register",
]

__getattr__ = lazy_names(
    __name__,
    {
        "SETTINGS_KEY": "settings",
        "EngineSettings": "settings",
        "ExpectedLayers": "weight_loading",
        "WeightConverter": "weight_loading",
        "add_adapters": "adapters",
        "make_room": "adapters",
        "experts_operator": "experts_product",
    },
)


def register() -> None:
    """Teach vLLM the quantization method `mxfp4_rl`. vLLM calls this in each of its processes, maybe more than once."""
    from .quantization import register_method

    register_method()
