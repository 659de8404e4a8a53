# SPDX-License-Identifier: Apache-2.0
"""What the products of a layer are: plain data, made once per layer."""

from dataclasses import dataclass, field

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
        is_plain: whether gradients are products of output gradients as they are with the operands of the forward
            product, that is without random numbers, rotations and quantization of their own.
        draws_forward: whether the forward product draws random numbers.
        saves_raw_input: whether Wgrad takes the input itself and not what the forward product used of it.
        reuses_weight: whether Dgrad takes what the forward product used of the weight.
        rotation_size: of the forward product; 1 without a rotation.
        input_scheme, weight_scheme: how the forward product quantizes its operands in blocks; `None` where it does not.
        packs_weight: whether stored 4-bit weights can stand for the forward operand.
    """

    scheme: LinearScheme
    backend: str = "auto"
    matmul_backend: str = "dense"
    saved: str = "full"
    transposed: bool = False
    is_plain: bool = field(init=False)
    draws_forward: bool = field(init=False)
    saves_raw_input: bool = field(init=False)
    reuses_weight: bool = field(init=False)
    rotation_size: int = field(init=False)
    input_scheme: QuantScheme | None = field(init=False)
    weight_scheme: QuantScheme | None = field(init=False)
    packs_weight: bool = field(init=False)

    def __post_init__(self):
        scheme, fprop = self.scheme, self.scheme.fprop
        quantized_x, quantized_weight = (isinstance(side, QuantScheme) for side in (fprop.left, fprop.right))
        rotates = fprop.rotation is not None
        derived = {
            "is_plain": scheme.dgrad == scheme.wgrad == PLAIN and not rotates and not scheme.is_random,
            "draws_forward": fprop.is_random,
            "saves_raw_input": scheme.wgrad.right is not REUSE,
            "reuses_weight": scheme.dgrad.right is REUSE,
            "rotation_size": fprop.rotation.size if rotates else 1,
            "input_scheme": fprop.left if quantized_x else None,
            "weight_scheme": fprop.right if quantized_weight else None,
            "packs_weight": quantized_weight and not rotates and not fprop.is_random,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


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
