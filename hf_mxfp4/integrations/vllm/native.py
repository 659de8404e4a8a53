# SPDX-License-Identifier: Apache-2.0
"""Plain MXFP4 weights handed to vLLM's own kernels, which know codes and scales and nothing else."""

from typing import Any

import torch

from ...config import MXFP4RLConfig
from .linears import MXFP4RLLinearMethod
from .served import WeightBytes


def unsupported_by_native_kernels(scheme: MXFP4RLConfig) -> str | None:
    """Why vLLM's MXFP4 kernels cannot compute what ``scheme`` says; `None` when they can."""
    weights = scheme.weight_scheme
    if weights.macro_block is not None:
        return f"vLLM's kernels know no macro factors (macro_block={weights.macro_block})"
    if weights.outlier_fallback is not None:
        return "vLLM's kernels know no residuals (outlier fallback)"
    if scheme.activation_scheme is not None:
        return "vLLM's kernels quantize activations by a rule of their own"
    if scheme.layer_overrides:
        return "layer_overrides may give layers schemes that vLLM's kernels do not know"
    try:
        from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel  # noqa: F401
    except ImportError:
        return "this version of vLLM has no MXFP4 kernels for linear layers (0.32 has)"
    return None


class MXFP4RLNativeLinearMethod(MXFP4RLLinearMethod):
    """``x Q(W)^T + b`` by the kernel that vLLM chooses for MXFP4 weights on this device; it rearranges them once, when
    all of them are loaded, so that none can be pushed later.

    Raises `ValueError`, from vLLM, where it has no such kernel.
    """

    def __init__(self, scheme: MXFP4RLConfig, *others: Any):
        from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel

        super().__init__(scheme, *others)
        self._kernel = init_mxfp4_linear_kernel()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """The parameters of packed storage, and the sizes by the names that vLLM's kernels read."""
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        super().create_weights(layer, *sizes, **extra_weight_attrs)
        layer.logical_widths, layer.params_dtype = output_partition_sizes, params_dtype
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Hand them over. Raise `ValueError` unless all tensors came."""
        super().process_weights_after_loading(layer)
        self._kernel.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernel.apply_weights(layer, x, bias)

    def weight_bytes(self, layer: torch.nn.Module) -> WeightBytes:
        """What the layer's tensors take in this process, as they are now."""
        tensors = [parameter for name, parameter in layer.named_parameters(recurse=False) if name != "bias"]
        return WeightBytes.of(tensors, *layer.mxfp4_shape, self.scheme.weight_scheme)
