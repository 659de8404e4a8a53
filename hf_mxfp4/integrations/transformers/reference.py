# SPDX-License-Identifier: Apache-2.0
"""Load the reference model that a TRL trainer makes under the scheme of its policy.

DPO and other trainers of TRL load their reference with `from_pretrained` from the folder or name that the policy was
loaded from, without the policy's `quantization_config`. In full precision it would hold the policy to values that the
policy cannot compute.
"""

import copy
import functools
import sys
from typing import Any

from transformers import modeling_utils

from ..._logging import get_logger
from ...config import MXFP4RLConfig


def policy_scheme(config: Any) -> MXFP4RLConfig | None:
    """Return the scheme of the quantized policy of the TRL trainer that is loading a model from the same place, or
    `None` where no trainer is, or where it has ``quantize_reference=False``."""
    frame, source = sys._getframe(1), None
    while frame is not None:
        if source is None:
            source = frame.f_locals.get("pretrained_model_name_or_path")
        if frame.f_globals.get("__name__", "").startswith("trl."):
            trainer = frame.f_locals.get("self")
            policy = getattr(trainer, "model", None)
            scheme = getattr(getattr(policy, "hf_quantizer", None), "quantization_config", None)
            if isinstance(scheme, MXFP4RLConfig) and getattr(trainer.args, "quantize_reference", True):
                if policy.config.name_or_path == str(source) and type(policy.config) is type(config):
                    return scheme
        frame = frame.f_back
    return None


def watch_references() -> None:
    """Have transformers ask [`policy_scheme`] for models that are loaded without a scheme."""
    choose = modeling_utils.get_hf_quantizer
    if getattr(choose, "asks_policy_scheme", False):
        return

    @functools.wraps(choose)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        if quantization_config is None and getattr(config, "quantization_config", None) is None:
            scheme = policy_scheme(config)
            if scheme is not None:
                get_logger().info("the reference model gets the scheme of the policy: %s", scheme.describe())
                quantization_config = copy.deepcopy(scheme)
        return choose(config, quantization_config, *args, **kwargs)

    get_hf_quantizer.asks_policy_scheme = True
    modeling_utils.get_hf_quantizer = get_hf_quantizer
