# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own product of E4M3 with a scale for every 128 elements of both operands, on compute capability 9.0.

cuBLASLt has it from CUDA 12.9 on. What it refuses, or computes wrongly (its family of
[`hf_mxfp4.backends.self_check`]), is for the Triton kernel.
"""

import functools

import torch
import torch.nn.functional as F

from .._logging import get_logger


_GROUP = 128
#: What lets vectors of 16 bytes begin each row of the operands' scales (float32) and of a 16-bit result.
_ROWS, _COLUMNS = 4, 16
_CUDA = (12, 9)
_DTYPES = (torch.bfloat16, torch.float32)

#: Shapes that were refused here, with the dtype of the result.
_refused: set[tuple[object, ...]] = set()


@functools.lru_cache(maxsize=64)
def exists(device: torch.device) -> bool:
    """Whether this PyTorch has the product for a device."""
    if device.type != "cuda" or torch.version.cuda is None or not hasattr(F, "scaled_mm"):
        return False
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    has_scales = hasattr(getattr(F, "ScalingType", None), "BlockWise1x128")
    return has_scales and version >= _CUDA and torch.cuda.get_device_capability(device) == (9, 0)


def takes(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether operands as those of [`multiply`] have shapes for it, and were not refused before."""
    if not exists(a.device) or dtype not in _DTYPES:
        return False
    (m, k), n = a.shape, b.shape[0]
    groups = k // _GROUP
    fits = m > 0 and n > 0 and k > 0 and k % _GROUP == 0 and m % _ROWS == 0 and n % _COLUMNS == 0
    widths = {scale.shape[1] for scale in (a_scale, b_scale)}
    return fits and groups in widths and widths <= {1, groups} and (m, n, k, dtype) not in _refused


def multiply(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``a b^T`` in ``dtype``, ``[M, N]``.

    Args:
        a: ``float8_e4m3fn [M, K]``, contiguous.
        a_scale: float32 ``[M, K/128]``, or ``[M, 1]`` of whole rows. Laid out along M, as folds write it, the former is
            not copied.
        b, b_scale: ``[N, K]`` and ``[N, K/128]`` or ``[N, 1]``, likewise.

    Raises:
        RuntimeError, ValueError: as PyTorch refuses them.
    """
    per_group, groups = F.ScalingType.BlockWise1x128, a.shape[1] // _GROUP
    # Fast accumulation would keep 14 bits of sums over more than a group.
    return F.scaled_mm(
        a,
        b.t(),
        _along_rows(a_scale, groups),
        per_group,
        _along_rows(b_scale, groups),
        per_group,
        output_dtype=dtype,
        use_fast_accum=False,
    )


def try_multiply(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """[`multiply`], or `None` where PyTorch refuses these shapes, which is said once for each and not tried again."""
    try:
        return multiply(a, a_scale, b, b_scale, dtype)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        _refused.add((a.shape[0], b.shape[0], a.shape[1], dtype))
        get_logger().warning(
            "PyTorch's product with scales of 128 elements refuses %d x %d x %d (%s); the Triton kernel replaces it",
            a.shape[0],
            b.shape[0],
            a.shape[1],
            error,
        )
        return None


def _along_rows(scale: torch.Tensor, n_groups: int) -> torch.Tensor:
    """Scales ``[R, G]``, or ``[R, 1]`` of whole rows, as ``[R, G]`` with the strides ``(1, R)``, to the letter also
    where R or G is 1."""
    n_rows = scale.shape[0]
    return scale.expand(n_rows, n_groups).t().contiguous().as_strided((n_rows, n_groups), (1, n_rows))
