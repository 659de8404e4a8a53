# SPDX-License-Identifier: Apache-2.0
"""The three products of a linear layer: plain data, made once for a layer."""

from dataclasses import dataclass, field
from typing import Any

from ..numerics import FP8, FULL, MXFP8, PLAIN, REUSE, LinearScheme, OperandScheme, QuantScheme


@dataclass(frozen=True)
class GemmSpec:
    """The three products of a linear layer, or of one projection of experts; a packed layer has the forward product
    alone.

    Attributes:
        scheme: the precision of each operand of each product.
        backend: what quantizes; see [`hf_mxfp4.fake_quantize`].
        matmul_backend: what multiplies; see [`hf_mxfp4.ops.select_matmul`].
        transposed: whether the weights of experts are ``[E, K, N]`` and not ``[E, N, K]``.
        is_plain: whether gradients are products of output gradients as they are with the operands of the forward
            product, that is without random numbers, rotations and quantization of their own.
        is_random: whether any product draws random numbers.
        draws_forward: whether the forward product draws random numbers.
        saves_raw_input: whether Wgrad takes the input itself and not what the forward product used of it.
        saves_fp8: whether the input is saved for Wgrad as E4M3 elements and scales, which hold that operand exactly.
        reuses_weight: whether Dgrad takes what the forward product used of the weight.
        rotation_size: of the forward product; 1 without a rotation.
        folds_scales: see [`hf_mxfp4.numerics.LinearScheme`].
        input_scheme, weight_scheme: how the forward product quantizes its operands; `None` where it does not.
        packs_weight: whether stored 4-bit weights can stand for the forward operand.
    """

    scheme: LinearScheme
    backend: str = "auto"
    matmul_backend: str = "dense"
    transposed: bool = False
    is_plain: bool = field(init=False)
    is_random: bool = field(init=False)
    draws_forward: bool = field(init=False)
    saves_raw_input: bool = field(init=False)
    saves_fp8: bool = field(init=False)
    reuses_weight: bool = field(init=False)
    rotation_size: int = field(init=False)
    folds_scales: bool = field(init=False)
    input_scheme: OperandScheme | None = field(init=False)
    weight_scheme: QuantScheme | None = field(init=False)
    packs_weight: bool = field(init=False)

    def __post_init__(self):
        scheme = self.scheme
        fprop = self.scheme.fprop
        quantized_weight = isinstance(fprop.right, QuantScheme)
        rotates = fprop.rotation is not None
        derived: dict[str, Any] = {
            "is_plain": scheme.dgrad == scheme.wgrad == PLAIN and not rotates and not scheme.is_random,
            "is_random": scheme.is_random,
            "draws_forward": fprop.is_random,
            "saves_raw_input": scheme.wgrad.right is not REUSE,
            "saves_fp8": fprop.left in (FP8, MXFP8) and scheme.wgrad.right is REUSE,
            "reuses_weight": scheme.dgrad.right is REUSE,
            "rotation_size": fprop.rotation.size if rotates else 1,
            "folds_scales": scheme.folds_scales,
            "input_scheme": None if fprop.left is FULL else fprop.left,
            "weight_scheme": fprop.right if quantized_weight else None,
            "packs_weight": quantized_weight and not rotates and not fprop.is_random,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def padded_length(self, length: int) -> int:
        """Return the columns of the forward operands of an axis of ``length`` elements: more where a rotation pads
        it."""
        return length + -length % self.rotation_size
