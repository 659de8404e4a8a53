# SPDX-License-Identifier: Apache-2.0
"""Master weights loaded from a 16-bit checkpoint, moved off the rounding boundaries of MXFP4.

About 1 % of the weights of a bfloat16 checkpoint lie exactly on a boundary between two MXFP4 values. The first
optimizer step, however small, flips them all along the gradient, while the straight-through estimator assumes that
quantized weights move as far as their masters. A dither within the cell of each 16-bit number
([`hf_mxfp4.numerics.dither`]) puts the masters where those of a float32 checkpoint would be. Here it is one-sided
where it has to be: a place that would change a code or a scale is mirrored, so that a weight on a boundary leaves it
to the side that rounding had chosen, and the quantized policy of the first forward pass is that of the checkpoint.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers.utils.logging import tqdm

from ._logging import get_logger
from .gemm import LayerRng, rotate_operand
from .gemm.packed_weight import dequantize, packed_tensor, quantize_weight
from .layers import Matrix, trainable_matrices
from .layers.sharded import whole
from .numerics import BLOCK_SIZE, GemmScheme, QuantScheme
from .numerics.dither import Cells, sixteen_bit_dtype


#: Seconds after which progress is shown.
_PATIENCE = 2
#: Weights are dithered in portions of about this many elements, to bound what lies beside them.
_PORTION = 1 << 20
#: How often places are tried before they are given up; how often they are drawn anew for blocks that change, and for
#: blocks that another selection for fallback would take.
_ATTEMPTS = 24
_DRAWS = 20
_SELECTIONS = 8
#: A weight lies on a boundary when moving it by this share of itself, up or down, makes a difference.
_NUDGE = 2.0**-21
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
    forward product takes in full precision or rounds at random.

    Raises:
        ValueError: the model has no trainable quantized layer, or its weights are sharded by FSDP2 already.
    """
    report = DitherReport()
    matrices = list(trainable_matrices(model))
    if not matrices:
        raise ValueError(f"{type(model).__name__} has no quantized layer with master weights to dither")
    parameters: dict[tuple[int, str], list[Matrix]] = {}
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
            with whole(parameter, writes=True) as value:
                if value.dtype == torch.float32 and _digest(value) == digest:
                    value.copy_(value.to(dtype))
                    n_rounded += 1
    if n_rounded:
        get_logger().info("%s: the dither of %d frozen weights was taken back", type(model).__name__, n_rounded)
    return n_rounded


def _digest(value: torch.Tensor) -> int:
    """A number that a training step changes."""
    return int(value.view(torch.int32).sum(dtype=torch.int64))


def _dither_parameter(matrices: list[Matrix], report: DitherReport) -> None:
    """Dither all matrices that one parameter holds."""
    parameter = getattr(matrices[0].layer, matrices[0].parameter)
    if hasattr(parameter, "full_tensor"):
        raise ValueError(f"{matrices[0].full_name} is sharded already; dither the model before FSDP2 takes it")
    reason = _unsupported_reason(parameter, matrices[0].fprop)
    if reason is None:
        with whole(parameter, writes=True) as value:
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
    if fprop.is_random:
        return "are rounded or rotated at random in the forward product"
    return None


def _dither_matrix(matrix: Matrix, weight: torch.Tensor, dtype: torch.dtype, report: DitherReport) -> None:
    """Dither one matrix ``[N, K]`` in place."""
    fprop, rng = matrix.fprop, matrix.rng
    backend, scheme = matrix.layer.config.backend, fprop.right
    forward = _ForwardWeight(scheme, fprop, rng, backend)
    # Blocks are selected for fallback by comparison with all others: their codes are matched first, as if all were.
    each = (
        forward
        if scheme.fallback_rate is None
        else _ForwardWeight(replace(scheme, fallback_rate=None), fprop, rng, backend)
    )
    generator = torch.Generator().manual_seed(rng.dither_seed)
    before = weight.clone()
    for rows in weight.split(max(1, _PORTION // max(1, weight.shape[1]) // BLOCK_SIZE) * BLOCK_SIZE):
        rows.copy_(each.ungrouped(_dithered(each.grouped(rows), dtype, each, generator), rows.shape))
    if each is not forward:
        _match_selection(weight, before, dtype, forward, each, generator)
    sample = _bands(weight)
    report.n_before += forward.count_on_boundaries(_bands(before))
    report.n_after += forward.count_on_boundaries(sample)
    report.n_sampled += sample.numel()
    report.n_weights += weight.numel()
    report.n_left += int(((weight == before) & (before != 0)).sum())
    report.dtypes = tuple(sorted({*report.dtypes, str(dtype).removeprefix("torch.")}))


def _match_selection(
    weight: torch.Tensor,
    before: torch.Tensor,
    dtype: torch.dtype,
    forward: "_ForwardWeight",
    each: "_ForwardWeight",
    generator: torch.Generator,
) -> None:
    """Dither groups of ``weight`` again, in place, or put them back to ``before``, until the same blocks are selected
    for the residual pass: those with the largest errors, which a dither moves a little."""
    wanted = forward.quantized(before)
    originals = each.grouped(before)
    for attempt in range(_ATTEMPTS):
        codes, blocks = forward.differences(wanted, forward.quantized(weight), weight.shape[1])
        differs = each.grouped(codes | blocks).flatten(1).any(dim=1)
        if not differs.any():
            return
        if attempt == _ATTEMPTS - 1:
            differs[:] = True
        groups, again = each.grouped(weight), originals[differs]
        groups[differs] = _dithered(again, dtype, each, generator) if attempt < _SELECTIONS else again
        weight.copy_(each.ungrouped(groups, weight.shape))


def _bands(weight: torch.Tensor) -> torch.Tensor:
    """A copy of up to 8 bands of 32 rows of a weight, evenly spaced; of all rows of a small one."""
    if weight.shape[0] <= _BAND * _BANDS:
        return weight.clone()
    bands = weight[: weight.shape[0] // _BAND * _BAND].unflatten(0, (-1, _BAND))
    return bands[:: -(-len(bands) // _BANDS)].flatten(0, 1)


# ---- the weight as the forward product takes it ----------------------------------------------------------------------


class _ForwardWeight:
    """Codes and scales of a weight in the forward product, and where those of two weights differ."""

    def __init__(self, scheme: QuantScheme, fprop: GemmScheme, rng: LayerRng, backend: str):
        self.scheme, self.rotation, self.rng, self.backend = scheme, fprop.rotation, rng, backend
        #: How many neighbours a code depends on.
        self.unit = BLOCK_SIZE if self.rotation is None else max(BLOCK_SIZE, self.rotation.size)

    def quantized(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of [`quantize_weight`] for ``[..., N, K]``, in that shape but for the last axis."""
        rotated = rotate_operand(rows.reshape(-1, rows.shape[-1]), self.rotation, "fprop", self.rng)
        tensors = quantize_weight(rotated, self.scheme, self.backend)
        return {name: tensor.view(*rows.shape[:-1], -1) for name, tensor in tensors.items()}

    def differences(
        self, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], columns: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks ``[..., columns]`` of the elements whose code differs in either pass, and of those in blocks of which a
        scale or a macro byte does. Where a rotation mixes elements, all that it mixes count as such a block."""
        codes = torch.zeros_like(wanted["weight"][..., :1], dtype=torch.bool).expand(
            *wanted["weight"].shape[:-1], columns
        )
        blocks = codes
        for name, tensor in wanted.items():
            bits = tensor ^ found[name]
            if name in ("weight", "weight_residual"):
                pairs = torch.stack([bits & 0xF, bits >> 4], dim=-1) != 0
                codes = codes | pairs.flatten(-2)[..., :columns]
            else:
                size = self.scheme.macro_block if name == "weight_macro" else BLOCK_SIZE
                size = columns if size == "row" else max(size, BLOCK_SIZE)
                blocks = blocks | _per_element(bits != 0, size, columns)
        if self.rotation is not None:
            padded = nn.functional.pad(codes | blocks, (0, -columns % self.unit))
            blocks = _per_element(padded.unflatten(-1, (-1, self.unit)).any(dim=-1), self.unit, columns)
        return codes, blocks

    def reflected(
        self, values: torch.Tensor, wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Values on the other side of the boundaries that they crossed, as far from them: a boundary lies in the middle
        between the grid values on its sides. ``found`` is what ``values`` are quantized to, ``wanted`` what they were
        before; for elements whose codes alone differ."""
        sides = [self._passes(tensors, values.shape[-1]) for tensors in (wanted, found)]
        (first, residual), (other, other_residual) = sides
        twice = first + other
        if residual is not None:
            twice = torch.where(first == other, twice + residual + other_residual, twice)
        return twice - values

    def _passes(self, tensors: dict[str, torch.Tensor], columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the codes of the first pass stand for, and those of the residual pass, without their weight alpha."""

        def values(suffix: str) -> torch.Tensor:
            names = {
                "weight": f"weight{suffix}",
                "weight_scale": f"weight{suffix}_scale",
                "weight_macro": "weight_macro",
            }
            one_pass = {name: tensors[own].flatten(0, -2) for name, own in names.items() if own in tensors}
            tensor = packed_tensor(one_pass, columns, replace(self.scheme, outlier_fallback=None), torch.float32)
            return dequantize(tensor, torch.float32, self.backend).view(*tensors["weight"].shape[:-1], columns)

        return values(""), values("_residual") if "weight_residual" in tensors else None

    def grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[N, K]`` as groups ``[groups, rows of a group, columns of a group]`` that are quantized independently
        of each other: macro blocks or rotated blocks where these divide the weight evenly, whole rows elsewhere."""
        n, k = rows.shape
        height, width = self.scheme.block_rows, k
        if self.scheme.macro_block != "row":
            width = max(self.unit, self.scheme.macro_block or 0)
        if k % width:
            width = k
        if n % height:
            height, width = n, k
        return rows.reshape(n // height, height, k // width, width).transpose(1, 2).reshape(-1, height, width)

    def ungrouped(self, groups: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What [`grouped`] made groups of, in its shape ``[N, K]``."""
        n, k = shape
        _, height, width = groups.shape
        return groups.reshape(n // height, k // width, height, width).transpose(1, 2).reshape(n, k)

    def count_on_boundaries(self, rows: torch.Tensor) -> int:
        """How many elements of rows lie on a boundary of their codes; a block on one of its scale counts as one."""
        nudge = rows.abs() * _NUDGE
        codes, blocks = self.differences(self.quantized(rows + nudge), self.quantized(rows - nudge), rows.shape[-1])
        return int((codes & ~blocks).sum()) + int(blocks.sum()) // BLOCK_SIZE


# ---- places that leave every code and scale as it is -----------------------------------------------------------------


def _dithered(
    groups: torch.Tensor, dtype: torch.dtype, forward: _ForwardWeight, generator: torch.Generator
) -> torch.Tensor:
    """Groups of numbers of ``dtype`` (see [`_ForwardWeight.grouped`]) at random places of their cells, at which they
    have the codes and scales that they have in the middle.

    Groups that differ are tried again. An element whose code differs goes to the other side of the boundary that it
    crossed, where as many steps then lead over it as over a boundary between weights in general position. Blocks whose
    scale differs are tried with their largest elements on the other side, then drawn anew. Both come nearer and nearer
    to the middle, where they stay when nothing else is left.
    """
    cells = Cells(groups, dtype)
    wanted = forward.quantized(groups)
    places = cells.draw(generator)
    tried, active = places, torch.arange(len(places), device=places.device)
    for attempt in range(_ATTEMPTS):
        values = cells.values(tried, active)
        found = forward.quantized(values)
        differs = _any_difference(wanted, found)
        if not differs.any():
            break
        active, tried, values = active[differs], tried[differs], values[differs]
        wanted, found = ({name: tensor[differs] for name, tensor in tensors.items()} for tensors in (wanted, found))
        if attempt == _ATTEMPTS - 1:
            tried = torch.zeros_like(tried)
        else:
            codes, blocks = forward.differences(wanted, found, values.shape[-1])
            other_side = -tried
            if attempt % 2:
                other_side >>= 1
            elif forward.rotation is None:
                reflected = cells.places(forward.reflected(values, wanted, found), active)
                other_side = torch.where(reflected.abs() <= cells.outermost, reflected.to(torch.int16), other_side)
            if attempt == 0:
                of_blocks = torch.where(_is_largest(cells.weight[active]), -tried, tried)
            elif attempt < _DRAWS:
                of_blocks = cells.draw(generator, active) >> attempt // 3
            else:
                of_blocks = torch.zeros_like(tried)
            tried = torch.where(blocks, of_blocks, torch.where(codes, other_side, tried))
        places[active] = tried
    return cells.values(places)


def _any_difference(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mask of the groups along the first axis in which any byte differs."""
    differs = [(tensor != found[name]).flatten(1).any(dim=1) for name, tensor in wanted.items()]
    return torch.stack(differs).any(dim=0)


def _is_largest(weight: torch.Tensor) -> torch.Tensor:
    """The elements with the largest magnitude of their blocks of 32 columns."""
    magnitude = weight.abs()
    padded = nn.functional.pad(magnitude, (0, -weight.shape[-1] % BLOCK_SIZE))
    largest = padded.unflatten(-1, (-1, BLOCK_SIZE)).amax(dim=-1)
    return magnitude == _per_element(largest, BLOCK_SIZE, weight.shape[-1])


def _per_element(of_blocks: torch.Tensor, size: int, width: int) -> torch.Tensor:
    return of_blocks.unsqueeze(-1).expand(*of_blocks.shape, size).flatten(-2)[..., :width]
