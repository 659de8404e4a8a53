# SPDX-License-Identifier: Apache-2.0
"""Master weights loaded from a 16-bit checkpoint, moved off the rounding boundaries of MXFP4.

About 1 % of the weights of a bfloat16 checkpoint lie exactly on a boundary between two MXFP4 values. The first
optimizer step, however small, flips them all along the gradient, while the straight-through estimator assumes that
quantized weights move as far as their masters. A dither within the cell of each 16-bit number
([`hf_mxfp4.numerics.dither`]) puts the masters where those of a float32 checkpoint would be. Here it is one-sided
where it has to be: a place that would change a code or a scale is mirrored, so that a weight on a boundary leaves it
to the side that rounding had chosen, and the quantized policy of the first forward pass is that of the checkpoint.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.utils.logging import tqdm

from ._logging import get_logger
from .dither_places import ForwardWeight, dithered
from .layers import WeightMatrix, trainable_matrices
from .layers.sharded import gathered
from .numerics import BLOCK_SIZE, GemmScheme, QuantScheme
from .numerics.dither import Cells, crowding, sixteen_bit_dtype


#: Seconds after which progress is shown.
_PATIENCE = 2
#: Weights are dithered in portions of about this many elements, to bound what lies beside them.
_PORTION = 1 << 20
#: Why nothing is done to the weights of most checkpoints in float32.
_FULL_NUMBERS = "are no 16-bit numbers"
#: Rows of each weight, in bands of 32, on which boundaries are counted.
_BAND, _BANDS = 32, 8


@dataclass
class DitherReport:
    """What the dither did to the master weights of a model; `quantization_report.dither`.

    Attributes:
        n_weights: elements of the matrices that were dithered.
        dtypes: of the numbers that they were, ``"bfloat16"`` or ``"float16"``; rounding to it gives them back.
        n_left: elements other than zeros that stayed where they were, since any place changed a code or a scale.
        skipped: by reason, how many matrices were left alone.
        n_sampled: elements that boundaries were counted on: up to 256 rows of each matrix.
        n_before, n_after: those of them that lay on a boundary of their codes or scales before and after.
    """

    n_weights: int = 0
    dtypes: tuple[str, ...] = ()
    n_left: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    n_sampled: int = 0
    n_before: int = 0
    n_after: int = 0

    @property
    def share_before(self) -> float:
        """Share of the weights that lay on a boundary as they were loaded."""
        return self.n_before / max(1, self.n_sampled)

    @property
    def share_after(self) -> float:
        """Share of the weights that lie on a boundary after the dither."""
        return self.n_after / max(1, self.n_sampled)

    @property
    def is_worth_a_word(self) -> bool:
        """Whether more is to say than that the masters lie on no boundaries anyway."""
        return self.n_weights > 0 or set(self.skipped) != {_FULL_NUMBERS}

    def __str__(self) -> str:
        if self.n_weights == 0:
            return "no dither: " + "; ".join(f"{count} weights {reason}" for reason, count in self.skipped.items())
        return (
            f"dithered {self.n_weights} weights within their {'/'.join(self.dtypes)} numbers, on rounding boundaries "
            f"{self.share_before:.3%} -> {self.share_after:.3%}"
        )


@torch.no_grad()
def dither_masters(model: nn.Module) -> DitherReport:
    """Move the float32 master weights of ``model`` that are 16-bit numbers to random places within half an ulp of
    those numbers, in place, and say what was done.

    `from_pretrained` does this under `MXFP4RLConfig(dither_ties=True)`, the default. The places are a function of
    `stochastic_seed` and of the layers' names, hence the same on all processes; under ZeRO-3 all of them must call
    this. Rounding the weights to the dtype that they came in gives back the checkpoint bit for bit, and so does
    quantizing them: every code and scale is as before. Left alone are masters that are no 16-bit numbers (those of a
    run that was saved in float32), masters kept in 16 bits, where no step is smaller than an ulp, and weights that the
    forward product takes in full precision, rounds at random, or rotates.

    Raises:
        ValueError: the model has no trainable quantized layer, or its weights are sharded by FSDP2 already.
    """
    report = DitherReport()
    matrices = list(trainable_matrices(model))
    if not matrices:
        raise ValueError(f"{type(model).__name__} has no quantized layer with master weights to dither")
    parameters: dict[tuple[int, str], list[WeightMatrix]] = {}
    for matrix in matrices:
        parameters.setdefault((id(matrix.layer), matrix.parameter), []).append(matrix)
    for held in tqdm(parameters.values(), desc="Dithering weights", leave=False, delay=_PATIENCE):
        _dither_parameter(held, report)
    return report


@torch.no_grad()
def round_frozen_masters(model: nn.Module) -> int:
    """Give frozen master weights that were dithered, and not trained since, the 16-bit numbers of the checkpoint back,
    in place: no step will move them. Returns the number of parameters; codes and scales stay the same.

    PEFT's LoRA does this to the base that it freezes. Under ZeRO-3 all processes must call it.
    """
    n_rounded = 0
    for layer in {id(matrix.layer): matrix.layer for matrix in trainable_matrices(model)}.values():
        for name, (dtype, digest) in list(layer.dithered.items()):
            parameter = getattr(layer, name)
            if parameter.requires_grad or parameter.is_meta or hasattr(parameter, "full_tensor"):
                continue
            del layer.dithered[name]
            with gathered(parameter, writes=True) as value:
                if value.dtype == torch.float32 and _digest(value) == digest:
                    value.copy_(value.to(dtype))
                    n_rounded += 1
    if n_rounded:
        get_logger().info("%s: the dither of %d frozen weights was taken back", type(model).__name__, n_rounded)
    return n_rounded


def _digest(value: torch.Tensor) -> int:
    """A number that a training step changes."""
    return int(value.view(torch.int32).sum(dtype=torch.int64))


def _dither_parameter(matrices: list[WeightMatrix], report: DitherReport) -> None:
    """Dither all matrices that one parameter holds."""
    parameter = getattr(matrices[0].layer, matrices[0].parameter)
    if hasattr(parameter, "full_tensor"):
        raise ValueError(f"{matrices[0].full_name} is sharded already; dither the model before FSDP2 takes it")
    reason = _unsupported_reason(parameter, matrices[0].fprop)
    if reason is None:
        with gathered(parameter, writes=True) as value:
            dtype = sixteen_bit_dtype(value)
            if dtype is None:
                reason = _FULL_NUMBERS
            else:
                for matrix in matrices:
                    _dither_matrix(matrix, matrix.of(value), dtype, report)
                matrices[0].layer.dithered[matrices[0].parameter] = dtype, _digest(value)
    if reason is not None:
        report.skipped[reason] = report.skipped.get(reason, 0) + len(matrices)


def _unsupported_reason(parameter: nn.Parameter, fprop: GemmScheme) -> str | None:
    if parameter.is_meta:
        return "are not materialised"
    if parameter.dtype != torch.float32:
        return f"are trained in {str(parameter.dtype).removeprefix('torch.')}"
    if not isinstance(fprop.right, QuantScheme):
        return "are in full precision in the forward product"
    if fprop.rotation is not None:
        return "are rotated in the forward product"
    if fprop.is_random:
        return "are rounded at random in the forward product"
    return None


def _dither_matrix(matrix: WeightMatrix, weight: torch.Tensor, dtype: torch.dtype, report: DitherReport) -> None:
    """Dither one matrix ``[N, K]`` in place."""
    forward = ForwardWeight(matrix.fprop.right, matrix.layer.config.backend)
    generator = torch.Generator().manual_seed(matrix.rng.dither_seed)
    before, crowds = weight.clone(), crowding(weight, dtype)
    for rows in weight.split(max(1, _PORTION // max(1, weight.shape[1]) // BLOCK_SIZE) * BLOCK_SIZE):
        cells = Cells(forward.grouped(rows), dtype, crowds)
        rows.copy_(forward.ungrouped(dithered(cells, forward, generator), rows.shape))
    sample = _bands(weight)
    report.n_before += forward.count_on_boundaries(_bands(before))
    report.n_after += forward.count_on_boundaries(sample)
    report.n_sampled += sample.numel()
    report.n_weights += weight.numel()
    report.n_left += int(((weight == before) & (before != 0)).sum())
    report.dtypes = tuple(sorted({*report.dtypes, str(dtype).removeprefix("torch.")}))


def _bands(weight: torch.Tensor) -> torch.Tensor:
    """A copy of up to 8 bands of 32 rows of a weight, evenly spaced; of all rows of a small one."""
    if weight.shape[0] <= _BAND * _BANDS:
        return weight.clone()
    bands = weight[: weight.shape[0] // _BAND * _BAND].unflatten(0, (-1, _BAND))
    return bands[:: -(-len(bands) // _BANDS)].flatten(0, 1)
