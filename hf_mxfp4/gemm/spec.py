# SPDX-License-Identifier: Apache-2.0
"""What the products of a layer are: plain data, made once per layer, that goes down with the tensors of every call."""

from dataclasses import dataclass, field

from ..numerics import FULL, PLAIN, REUSE, GemmScheme, LinearScheme, QuantScheme, Rotation


@dataclass(frozen=True)
class GemmSpec:
    """The three products of a linear layer, or of one projection of experts.

    Attributes:
        scheme: how each product treats its operands.
        backend: what quantizes; see [`hf_mxfp4.fake_quantize`].
        gemm_kernel: what multiplies; see [`hf_mxfp4.gemm.select_kernel`].
        saved: the form of the input that is saved for Wgrad, one of [`hf_mxfp4.numerics.SAVED_FORMS`].
        transposed: whether the weights of experts are ``[E, K, N]`` and not ``[E, N, K]``.
        is_random, draws_forward: whether any product draws random numbers, and whether the forward one does.
        is_plain: whether gradients are products of output gradients as they are with the operands of the forward
            product, that is without random numbers, rotations and quantization of their own.
        saves_raw_input: whether Wgrad takes the input itself and not what the forward product used of it.
        reuses_weight: whether Dgrad takes what the forward product used of the weight.
        rotation_size: of the forward product; 1 where it does not rotate.
        quantizes_input: whether it quantizes the input, with blocks.
        input_text: the scheme of that as text, ``""`` for none.
        keeps_input: whether the operand of the forward product is the input itself, but for its dtype.
        keeps_weight: the same of the weight.
        packs_weight: whether stored 4-bit weights can stand for the forward operand.
    """

    scheme: LinearScheme
    backend: str = "auto"
    gemm_kernel: str = "dense"
    saved: str = "full"
    transposed: bool = False
    is_random: bool = field(init=False)
    draws_forward: bool = field(init=False)
    is_plain: bool = field(init=False)
    saves_raw_input: bool = field(init=False)
    reuses_weight: bool = field(init=False)
    rotation_size: int = field(init=False)
    quantizes_input: bool = field(init=False)
    input_text: str = field(init=False)
    keeps_input: bool = field(init=False)
    keeps_weight: bool = field(init=False)
    packs_weight: bool = field(init=False)

    def __post_init__(self):
        scheme, fprop = self.scheme, self.scheme.fprop
        quantized_x, quantized_weight = (isinstance(side, QuantScheme) for side in (fprop.left, fprop.right))
        rotates = fprop.rotation is not None
        derived = {
            "is_random": scheme.is_random,
            "draws_forward": fprop.is_random,
            "is_plain": scheme.dgrad == scheme.wgrad == PLAIN and not rotates and not scheme.is_random,
            "saves_raw_input": scheme.wgrad.right is not REUSE,
            "reuses_weight": scheme.dgrad.right is REUSE,
            "rotation_size": fprop.rotation.size if rotates else 1,
            "quantizes_input": quantized_x,
            "input_text": str(fprop.left) if quantized_x else "",
            "keeps_input": not quantized_x and not rotates,
            "keeps_weight": not quantized_weight and not rotates,
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
        weight_text, input_text: the schemes as text, ``""`` for none.
    """

    weights: QuantScheme
    inputs: QuantScheme | None
    in_features: int
    backend: str = "auto"
    rotation: Rotation | None = None
    weight_text: str = field(init=False)
    input_text: str = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "weight_text", str(self.weights))
        object.__setattr__(self, "input_text", "" if self.inputs is None else str(self.inputs))
