# SPDX-License-Identifier: Apache-2.0
"""What the products of a layer are: plain data, made once per layer."""

from dataclasses import dataclass
from functools import cached_property

from ..numerics import FULL, PLAIN, REUSE, GemmScheme, LinearScheme, QuantScheme, Rotation


@dataclass(frozen=True)
class GemmSpec:
    """The three products of a linear layer, or of one projection of experts.

    Attributes:
        scheme: the precision of each operand of each product.
        backend: what quantizes; see [`hf_mxfp4.fake_quantize`].
        matmul_backend: what multiplies; see [`hf_mxfp4.gemm.select_matmul`].
        saved: the form of the input that is saved for Wgrad, one of [`hf_mxfp4.numerics.SAVED_FORMS`].
        transposed: whether the weights of experts are ``[E, K, N]`` and not ``[E, N, K]``.
    """

    scheme: LinearScheme
    backend: str = "auto"
    matmul_backend: str = "dense"
    saved: str = "full"
    transposed: bool = False

    @cached_property
    def is_plain(self) -> bool:
        """Whether gradients are products of output gradients as they are with the operands of the forward product."""
        scheme = self.scheme
        return scheme.dgrad == scheme.wgrad == PLAIN and self.rotation_size == 1 and not scheme.is_random

    @cached_property
    def draws_forward(self) -> bool:
        """Whether the forward product draws random numbers."""
        return self.scheme.fprop.is_random

    @cached_property
    def saves_raw_input(self) -> bool:
        """Whether Wgrad takes the input itself and not what the forward product used of it."""
        return self.scheme.wgrad.right is not REUSE

    @cached_property
    def reuses_weight(self) -> bool:
        """Whether Dgrad takes what the forward product used of the weight."""
        return self.scheme.dgrad.right is REUSE

    @cached_property
    def rotation_size(self) -> int:
        """The size of the forward product's rotation; 1 without one."""
        rotation = self.scheme.fprop.rotation
        return 1 if rotation is None else rotation.size

    @cached_property
    def input_scheme(self) -> QuantScheme | None:
        """How the forward product quantizes the input in blocks; `None` where it does not."""
        left = self.scheme.fprop.left
        return left if isinstance(left, QuantScheme) else None

    @cached_property
    def weight_scheme(self) -> QuantScheme | None:
        """How the forward product quantizes the weight; `None` where it does not."""
        right = self.scheme.fprop.right
        return right if isinstance(right, QuantScheme) else None

    @cached_property
    def packs_weight(self) -> bool:
        """Whether stored 4-bit weights can stand for the forward operand."""
        return self.weight_scheme is not None and self.rotation_size == 1 and not self.draws_forward


#: Operands as they are, as those of adapters.
FULL_PRECISION = GemmSpec(LinearScheme(GemmScheme(FULL, FULL)))


@dataclass(frozen=True)
class PackedSpec:
    """The product of a layer whose weight exists in 4 bits only.

    Attributes:
        weights: the scheme of the weight.
        inputs: that of the input; `None` where it is not quantized.
        in_features: K; the codes have padding.
        backend: see [`hf_mxfp4.fake_quantize`].
        rotation: of inputs, as the weight was rotated before it was quantized; never a random one.
    """

    weights: QuantScheme
    inputs: QuantScheme | None
    in_features: int
    backend: str = "auto"
    rotation: Rotation | None = None
