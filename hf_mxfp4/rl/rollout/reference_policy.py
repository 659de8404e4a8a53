# SPDX-License-Identifier: Apache-2.0
"""The reference policy that `beta` > 0 holds the policy to, and whether it computes under the same scheme."""

from typing import Any

from torch import nn

from ..._logging import get_logger
from ...layers import QUANTIZED, matrix_names
from ..config import MXFP4GRPOConfig


def count_quantized(model: nn.Module) -> int:
    """Weight matrices in MXFP4; each projection of fused experts is one."""
    return sum(len(matrix_names("", module)) for module in model.modules() if isinstance(module, QUANTIZED))


def check_scheme(option: str, given: Any) -> None:
    """Raise `TypeError` for the name of a scheme in the place of a config, which transformers fails on without a
    message."""
    if isinstance(given, str):
        raise TypeError(
            f"{option} must be an MXFP4RLConfig, such as MXFP4RLConfig(preset='w4a4'), or its dict; got {given!r}"
        )


def reference_config(model: Any, given: Any, args: MXFP4GRPOConfig) -> Any:
    """The `quantization_config` to give [`trl.GRPOTrainer`], which loads the reference with it, and the policy too when
    ``model`` is a name. TRL by itself would load the reference of a policy that is no name in full precision.

    Raises `ValueError` where the two cannot differ.
    """
    if args.beta == 0 or (isinstance(model, str) and args.quantize_reference):
        return given
    if isinstance(model, str):
        raise ValueError(
            "quantize_reference=False loads the reference in another way than the policy: load the policy first, and "
            "give the model instead of its name"
        )
    if not args.quantize_reference:
        return None
    return getattr(model.config, "quantization_config", None) if given is None else given


def check_reference(policy: nn.Module, reference: nn.Module | None, args: MXFP4GRPOConfig) -> None:
    """Log what the reference policy computes in; ``reference`` is `None` without `beta` and for adapters.

    Raises `ValueError` when that is not what `quantize_reference` asks for.
    """
    if args.beta == 0:
        return
    if reference is None:
        if not args.quantize_reference:
            raise ValueError(
                "quantize_reference=False has no meaning with adapters: the reference is the policy itself without them"
            )
        get_logger().info("reference policy: the policy without its adapters, under its scheme")
        return
    expected, found = count_quantized(policy), count_quantized(reference)
    get_logger().info("reference policy: n_quantized=%d, of the policy %d", found, expected)
    if args.quantize_reference and found != expected:
        raise ValueError(
            f"the reference policy has {found} MXFP4 weight matrices and the policy {expected}: their divergence would "
            "include what quantization does. Load the policy by from_pretrained with quantization_config, which the "
            "reference is then loaded with; or set quantize_reference=False to accept it"
        )
    if not args.quantize_reference and found:
        raise ValueError(
            f"quantize_reference=False, but the checkpoint that the reference is loaded from is quantized ({found} "
            "weight matrices); remove quantization_config from its config.json"
        )
    if expected and not found:
        get_logger().warning(
            "the reference policy is in full precision and the policy quantized: beta=%g holds the policy to what it "
            "cannot compute, since kl includes the error of quantization",
            args.beta,
        )
