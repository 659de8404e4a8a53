# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights: on the codes where a kernel does that, otherwise with their dequantized values."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..backends import select as backends
from ..backends import triton as triton_kernels
from ..numerics import MXFP4Tensor, QuantScheme


def packed_product(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    bias: torch.Tensor | None,
    dequantize: Callable[[], torch.Tensor],
    backend: str = "auto",
) -> torch.Tensor:
    """``x Q(W)^T + b`` without gradients.

    The kernel sums exact products in float32, where dequantized values are rounded to the dtype of ``x`` first: with
    macro factors or residuals the two differ by about one rounding of the result.

    Args:
        x: ``[..., K]`` in the dtype of the product.
        weight: ``[N, K]``.
        bias: ``[N]`` in that dtype, or `None`.
        dequantize: gives ``Q(W)`` in that dtype, where no kernel computes on the codes: none that can, or too many
            rows for one. What it keeps between calls is then not dequantized again.
        backend: as for [`hf_mxfp4.fake_quantize`].
    """
    n_tokens, sizes = x.shape[:-1].numel(), (weight.codes.shape[0], weight.length)
    if computes_on_codes(x, weight.scheme, backend) and _is_fused(n_tokens, *sizes, weight.scheme, x.dtype):
        return triton_kernels.linear(x, weight, bias)
    return F.linear(x, dequantize(), bias)


def computes_on_codes(x: torch.Tensor, scheme: QuantScheme, backend: str = "auto") -> bool:
    """Whether [`packed_product`] hands tensors like ``x`` and a weight's codes to a kernel, given that they are not too
    many rows. Raises `ValueError` when the backend named cannot do it."""
    return backends.choose_backend(x, backends.as_read(scheme), backend) == "triton"


def packed_product_route(
    n_tokens: int,
    out_features: int,
    in_features: int,
    scheme: QuantScheme,
    device_type: str,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> tuple[str, str]:
    """How [`packed_product`] computes, in a word, and why: ``"fused"`` on the codes, ``"dense"`` on values that the
    kernels dequantize (and layers keep within [`hf_mxfp4.cached_weights`]), ``"eager"`` or ``"cpu"`` on values that
    these backends dequantize."""
    name, reason = backends.backend_for(device_type, dtype, backends.as_read(scheme), backend)
    if name != "triton":
        return name, reason or f"the tensor is on {device_type}"
    plan = triton_kernels.plan_linear(n_tokens, out_features, in_features, scheme, dtype)
    return plan.route, plan.reason


@functools.lru_cache(maxsize=4096)
def _is_fused(n_tokens: int, out_features: int, in_features: int, scheme: QuantScheme, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply with the codes, not with a copy that they would dequantize at every call."""
    if 0 in (n_tokens, out_features, in_features):
        return True
    return triton_kernels.plan_linear(n_tokens, out_features, in_features, scheme, dtype).route == "fused"
