# SPDX-License-Identifier: Apache-2.0
"""Master weights loaded from a 16-bit checkpoint, moved off the rounding boundaries of MXFP4.

About 1 % of the weights of a bfloat16 checkpoint lie exactly on a boundary between two MXFP4 values, and the first
optimizer step, however small, flips them all (docs/ties.md). A random place among the float32 numbers that round to a
16-bit number puts the masters where those of a float32 checkpoint would be. A place across a boundary is drawn again,
so that the quantized policy of the first forward pass is that of the checkpoint.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from ..layers import WeightMatrix, gathered, trainable_matrices
from ..numerics import (
    BLOCK_SIZE,
    FP8,
    GemmScheme,
    MXFP4Tensor,
    OperandScheme,
    QuantScheme,
    counted_uniform,
    quantize_e4m3,
    unpack_codes,
)
from ..ops import LayerRng, cpu, quantize
from ..utils import progress_bar


#: Dtypes that checkpoints have, and how many float32 numbers lie between one of their normal numbers and the midpoint
#: to the next. (The few subnormal numbers of float16 have wider cells than these.)
_HALF_CELL = {torch.bfloat16: 1 << 15, torch.float16: 1 << 12}
#: Seconds after which progress is shown.
_PATIENCE = 2
#: Weights are dithered in portions of about this many elements, to bound the memory that it takes.
_PORTION = 1 << 20
#: How often places are tried; in the later half they come nearer and nearer to the middle of the cell.
_ATTEMPTS = 24
#: Why nothing is done to the weights of most checkpoints in float32.
FULL_NUMBERS = "are no 16-bit numbers"


@dataclass
class DitherReport:
    """What the dither did to the master weights of a model; `quantization_report.dither`.

    Attributes:
        n_weights: elements of the matrices that were dithered.
        dtypes: of the numbers that they were, ``"bfloat16"`` or ``"float16"``; rounding to it gives them back.
        n_left: elements other than zeros that stayed where they were, since any place changed a code or a scale.
        skipped: by reason, how many matrices were left alone.
    """

    n_weights: int = 0
    dtypes: tuple[str, ...] = ()
    n_left: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def add(self, n_weights: int, dtype: torch.dtype) -> None:
        """Count weights that were dithered within numbers of ``dtype``."""
        self.n_weights += n_weights
        self.dtypes = tuple(sorted({*self.dtypes, str(dtype).removeprefix("torch.")}))

    def skip(self, reason: str, n_matrices: int) -> None:
        """Count matrices that were left alone for a reason."""
        self.skipped[reason] = self.skipped.get(reason, 0) + n_matrices

    def __str__(self) -> str:
        if self.n_weights == 0:
            return "no dither: " + "; ".join(f"{count} weights {reason}" for reason, count in self.skipped.items())
        return f"dithered {self.n_weights} weights within their {'/'.join(self.dtypes)} numbers"


@torch.no_grad()
def dither_masters(model: nn.Module, seed: int = 0) -> DitherReport:
    """Move the float32 master weights of ``model`` that are 16-bit numbers to random places within half an ulp of
    those numbers, in place, and say what was done.

    `from_pretrained` does this under `MXFP4RLConfig(dither_ties=True)`, the default. The places are a function of
    `stochastic_seed` and of the layers' names, hence the same on all processes; under ZeRO-3 all of them must call
    this. Every code and scale is as before, and rounding the weights to the dtype that they came in gives back the
    checkpoint bit for bit. Left alone are masters that are no 16-bit numbers, masters kept in 16 bits, and weights that
    the forward product takes in full precision, rounds at random, or rotates. In a model without quantized layers the
    trainable matrices other than embeddings are moved.

    Args:
        model: before FSDP2 or DDP take it.
        seed: of the places in a model without quantized layers.

    Raises:
        ValueError: the model has no trainable matrix, or its weights are sharded by FSDP2 already.
    """
    report = DitherReport()
    by_parameter: dict[tuple[int, str], list[WeightMatrix]] = {}
    for matrix in trainable_matrices(model):
        by_parameter.setdefault((id(matrix.layer), matrix.parameter), []).append(matrix)
    for matrices in progress_bar(by_parameter.values(), what="Dithering weights", delay=_PATIENCE):
        first = matrices[0]
        _dither_parameter(first.full_name, first.master, matrices, report)
    if by_parameter:
        return report
    plain = _plain_matrices(model)
    if not plain:
        raise ValueError(f"{type(model).__name__} has no trainable matrix whose places could be drawn")
    for name, parameter in plain.items():
        _dither_parameter(name, parameter, [], report, LayerRng(seed, name).dither_seed)
    return report


def _plain_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable matrices of a model without quantized layers, except embeddings."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and parameter.requires_grad and parameter not in embeddings
    }


def _dither_parameter(
    name: str, parameter: nn.Parameter, matrices: list[WeightMatrix], report: DitherReport, seed: int = 0
) -> None:
    """Dither the matrices that a parameter holds; without any it is a weight that no product quantizes."""
    reason = _unsupported_reason(name, parameter, matrices[0].fprop if matrices else None)
    if reason is None:
        with gathered(parameter, writes=True) as value:
            dtype = sixteen_bit_dtype(value)
            if dtype is None:
                reason = FULL_NUMBERS
            elif matrices:
                for matrix in matrices:
                    _dither_matrix(matrix, matrix.of(value), dtype, report)
            else:
                _dither_plain(value, dtype, seed)
                report.add(value.numel(), dtype)
    if reason is not None:
        report.skip(reason, len(matrices) or 1)


def _unsupported_reason(name: str, parameter: nn.Parameter, fprop: GemmScheme | None) -> str | None:
    """Return why a parameter is left alone; ``fprop``: the scheme of the products that quantize it, if any."""
    if hasattr(parameter, "full_tensor"):
        raise ValueError(f"{name} is sharded already; dither the model before FSDP2 takes it")
    if parameter.is_meta:
        return "are not materialised"
    if parameter.dtype != torch.float32:
        return f"are trained in {str(parameter.dtype).removeprefix('torch.')}"
    if fprop is None:
        return None
    if not isinstance(fprop.right, QuantScheme) and fprop.right is not FP8:
        return f"are taken in {fprop.right} in the forward product"
    if fprop.rotation is not None:
        return "are rotated in the forward product"
    if fprop.is_random:
        return "are rounded at random in the forward product"
    return None


def sixteen_bit_dtype(weight: torch.Tensor) -> torch.dtype | None:
    """Return the dtype, `torch.bfloat16` or `torch.float16`, that every element of a float32 tensor is a number of;
    `None` for weights that were trained or stored in more bits, and for tensors of other dtypes."""
    if weight.dtype != torch.float32:
        return None
    rows = max(1, _PORTION * weight.shape[0] // max(1, weight.numel()))
    for dtype in _HALF_CELL:
        if all(_are_numbers_of(dtype, portion) for portion in weight.split(rows)):
            return dtype
    return None


def _are_numbers_of(dtype: torch.dtype, weight: torch.Tensor) -> bool:
    return bool(((weight.to(dtype).float() == weight) | weight.isnan()).all())


def _dither_plain(weight: torch.Tensor, dtype: torch.dtype, seed: int) -> None:
    """Dither a weight that no product quantizes, in place."""
    rows = weight.contiguous().view(-1, weight.shape[-1])
    if rows.device.type == "cpu" and cpu.library_problem() is None:
        cpu.dither(rows, None, _HALF_CELL[dtype], _ATTEMPTS, seed)
    else:
        for places in torch.arange(len(rows), device=rows.device).split(max(1, _PORTION // rows.shape[1])):
            portion = rows[places]
            rows[places] = _at(portion, _draw(portion, dtype, seed, 0, places))
    weight.copy_(rows.view(weight.shape))


def _dither_matrix(matrix: WeightMatrix, weight: torch.Tensor, dtype: torch.dtype, report: DitherReport) -> None:
    """Dither one matrix ``[N, K]`` in place."""
    scheme = matrix.fprop.right
    backend = matrix.layer.config.backend
    seed = matrix.rng.dither_seed
    report.add(weight.numel(), dtype)
    on_cpu = weight.device.type == "cpu" and backend in ("auto", "cpu")
    if on_cpu and isinstance(scheme, QuantScheme) and cpu.unsupported_reason(weight.dtype, scheme) is None:
        rows = weight.contiguous()
        report.n_left += cpu.dither(rows, scheme, _HALF_CELL[dtype], _ATTEMPTS, seed)
        weight.copy_(rows)
        return
    n_before = 0
    portion_rows = max(1, _PORTION // max(1, weight.shape[1]) // BLOCK_SIZE) * BLOCK_SIZE
    for portion in weight.split(portion_rows):
        height, width = _group_size(portion, scheme)
        n_down = len(portion) // height
        n_across = portion.shape[1] // width
        groups = portion.reshape(n_down, height, n_across, width).transpose(1, 2).reshape(-1, width)
        rows = torch.arange(n_before, n_before + len(groups), device=weight.device)
        places = _places(groups, height, dtype, scheme, backend, seed, rows)
        report.n_left += int(((places == 0) & (groups != 0)).sum())
        moved = _at(groups, places).view(n_down, n_across, height, width)
        portion.copy_(moved.transpose(1, 2).reshape(portion.shape))
        n_before += len(groups)


def _group_size(rows: torch.Tensor, scheme: OperandScheme) -> tuple[int, int]:
    """Return the rows and columns of the smallest parts of a weight that are quantized independently of each other:
    macro blocks where these divide it evenly, whole rows or all of it elsewhere."""
    n, k = rows.shape
    height = scheme.block_rows
    if n % height:
        return n, k
    width = k
    if isinstance(scheme, QuantScheme) and scheme.macro_block != "row":
        width = max(BLOCK_SIZE, scheme.macro_block or 0)
    return height, k if k % width else width


def _places(
    weight: torch.Tensor,
    height: int,
    dtype: torch.dtype,
    scheme: OperandScheme,
    backend: str,
    seed: int,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return random places (int32 ``[N, K]``) that keep codes and scales.

    Where a place changes a code, it is drawn again, in the second half of the attempts ever nearer to the number.
    Groups that still change stay as they are.

    Args:
        weight: groups of ``height`` rows that are quantized together.
        seed, rows: what the places are drawn from: see [`hf_mxfp4.numerics.counted_uniform`].
    """
    wanted = _quantized(weight, scheme, backend)
    places = _draw(weight, dtype, seed, 0, rows)
    unsettled = torch.arange(len(weight), device=weight.device)  # rows
    for attempt in range(_ATTEMPTS):
        numbers = weight[unsettled]
        tried = places[unsettled]
        found = _quantized(_at(numbers, tried), scheme, backend)
        code_changed = _differences(_rows_of(wanted, unsettled), found)
        group_changed = code_changed.any(dim=1).view(-1, height).any(dim=1).repeat_interleave(height)
        if not group_changed.any():
            return places
        other = _draw(numbers, dtype, seed, attempt + 1, rows[unsettled])
        nearer = max(0, attempt - _ATTEMPTS // 2)
        places[unsettled] = torch.where(code_changed, other.sign() * (other.abs() >> nearer), tried)
        unsettled = unsettled[group_changed]
    places[unsettled] = 0
    return places


def _draw(weight: torch.Tensor, dtype: torch.dtype, seed: int, number: int, rows: torch.Tensor) -> torch.Tensor:
    """Draw how many float32 numbers farther from zero each weight goes (int32), for the ``number``-th time. Zeros,
    infinities and NaN stay."""
    limit = _HALF_CELL[dtype] - 1
    uniform = counted_uniform(tuple(weight.shape), seed, number, weight.device, rows)
    places = (uniform * (2 * limit + 1)).int() - limit
    # The cell of a power of two has a third of its width below it, and half of its float32 numbers.
    too_low = (weight.view(torch.int32) & 0x7FFFFF == 0) & (places < 0) & (places % 3 == 0)
    places = torch.where(too_low, -places, places)
    return places.masked_fill_((weight == 0) | ~weight.isfinite(), 0)


def _at(weight: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return (weight.view(torch.int32) + places).view(torch.float32)


#: Codes and scales of rows: in MXFP4, or E4M3 elements and a scale for each row.
Quantized = MXFP4Tensor | tuple[torch.Tensor, torch.Tensor]


def _quantized(weight: torch.Tensor, scheme: OperandScheme, backend: str) -> Quantized:
    """Quantize rows as the forward product does."""
    if scheme is FP8:
        elements, scale = quantize_e4m3(weight)
        return elements.view(torch.uint8), scale
    return quantize(weight, **vars(scheme), backend=backend)


def _rows_of(quantized: Quantized, rows: torch.Tensor) -> Quantized:
    """Return the codes and scales of some rows."""
    if isinstance(quantized, MXFP4Tensor):
        return quantized.map(lambda part: part[rows])
    elements, scale = quantized
    return elements[rows], scale[rows]


def _differences(wanted: Quantized, found: Quantized) -> torch.Tensor:
    """Return the mask ``[N, K]`` of elements whose code differs, or a scale or macro byte of theirs."""
    if isinstance(wanted, tuple) and isinstance(found, tuple):
        return (wanted[0] != found[0]) | (wanted[1] != found[1])
    assert isinstance(wanted, MXFP4Tensor)
    length = wanted.length
    macro = wanted.scheme.macro_block
    changed = torch.zeros(wanted.codes.shape[0], length, dtype=torch.bool, device=wanted.codes.device)
    for name in ("codes", "residual_codes"):
        if getattr(wanted, name) is not None:
            changed |= unpack_codes(getattr(wanted, name) ^ getattr(found, name), length) != 0
    macro_size = length if macro == "row" else max(macro or 0, BLOCK_SIZE)
    for name, size in (("scale", BLOCK_SIZE), ("macro", macro_size), ("residual_scale", BLOCK_SIZE)):
        if getattr(wanted, name) is not None:
            differs = getattr(wanted, name) != getattr(found, name)
            changed |= differs.repeat_interleave(size, dim=-1)[..., :length]
    return changed
