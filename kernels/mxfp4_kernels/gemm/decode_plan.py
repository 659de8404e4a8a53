# SPDX-License-Identifier: Apache-2.0
"""How a product with a packed weight is computed, by shape and GPU: on the codes, or on a dequantized copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton


#: Multiprocessors of the largest GPU of an architecture, for plans made without one at hand.
_MULTIPROCESSORS = {"80": 108, "86": 84, "89": 128, "90": 132, "100": 148, "120": 170, "gfx942": 304, "gfx950": 256}
#: More rows of x than this are multiplied with a dequantized copy: two bytes more are then written and read for each
#: weight, once, where every tile of rows decodes the weight again.
_MOST_TOKENS = 256
#: Programs that a multiprocessor holds at once, with the registers that the kernel takes, for tiles of up to 8 rows of
#: x, for larger ones, and for [`_halved`] ones.
_PROGRAMS_PER_MULTIPROCESSOR = (4, 2, 6)
#: Whether this Triton hands tensor cores eight neighbours from a thread where they read the decoded weight from
#: registers. From 3.8 on it is four or two, for which columns have other orders ([`order_of`]), and two warps take more
#: instructions for a weight than four.
IN_REGISTERS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
#: Columns of a step.
_STEP = 128
#: Steps of a split that pay for its start.
_LEAST_STEPS = 2
_MOST_SPLITS = 16
#: Warps that a multiprocessor needs to issue in most cycles: fewer wait for their own results half of the time.
_BUSY_WARPS = 8
#: Rows of a tile (0: as many as fit), stages of the pipeline, and how much of the GPU to fill; the usual ones first.
_TILES = ((0, 3, 1.0), (0, 4, 1.0), (64, 3, 1.0), (64, 3, 0.5), (32, 3, 1.0), (128, 3, 0.5))


#: bfloat16 numbers that add up to one of these exactly.
PIECES = {"bfloat16": 1, "float16": 2, "float32": 3}
#: Architectures whose tensor cores work for four warps at once (AMD's warps have twice the threads).
_FOUR_WARPS = ("90", "100", "103", "gfx942", "gfx950")
#: Architectures whose tensor cores read the left operand from registers.
_FROM_REGISTERS = ("80", "86", "89", "90", "120", "121")
#: Values of a product with a packed weight that a thread holds without spilling registers, of which it has 255.
_MOST_VALUES = 160


class LinearPlan(NamedTuple):
    """How [`mxfp4_kernels.linear_w4a16`] computes a product.

    Attributes:
        route: ``"fused"``, one kernel that decodes the weight on its way to the tensor cores, or ``"dense"``,
            dequantization followed by torch's product.
        reason: why, in words.
        configs: of the fused kernel, the heuristic's first: ``BM`` rows of x, ``BN`` rows of the weight and ``BK``
            columns in a tile, ``split_steps`` steps of ``BK`` columns for a program, ``num_warps``, ``num_stages``.
    """

    route: str
    reason: str
    configs: tuple[dict[str, int], ...] = ()


def plan_linear_w4a16(
    M: int,
    N: int,
    K: int,
    arch: str | None = None,
    *,
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    dtype: str = "bfloat16",
    multiprocessors: int | None = None,
) -> LinearPlan:
    """What [`mxfp4_kernels.linear_w4a16`] does with ``x[M, K]`` and a packed weight ``[N, K]``, and why.

    Args:
        M, N, K: sizes, all positive.
        arch: ``"90"`` and the like for NVIDIA's compute capability 9.0, ``"gfx942"`` and the like for AMD; by default
            that of the current GPU, or ``"90"`` without one.
        macro_block, macro_search, outlier_fallback: of the weight, as for [`mxfp4_kernels.quantize`].
        dtype: of x: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        multiprocessors: of the GPU; by default of the largest one of that architecture.
    """
    arch = arch or _current_arch()
    if obstacle := layout_obstacle(K, macro_block, macro_search):
        return LinearPlan("dense", obstacle)
    if M > _MOST_TOKENS:
        return LinearPlan("dense", f"{M} rows: decoding the weight once costs less than once for every tile of rows")
    simple = outlier_fallback is None and dtype == "bfloat16" and M <= 16
    halved = simple and _halved(_token_tile(M, arch), arch)
    # Many tokens, a second operand, or x in pieces take registers of their own. Each warp puts all of x in order, so
    # that tall tiles take fewer instructions for a weight than long ones.
    tall = 128 if simple and not halved else 64

    def fits(config: dict[str, int]) -> bool:
        return in_registers(config, _STEP, arch, pieces=PIECES[dtype], has_fallback=outlier_fallback is not None)

    rows = _token_tile(M, arch)
    while rows > 8 and not fits({"BM": rows, "BN": tall, "num_warps": 2 if halved else 4}):
        rows //= 2
    held = _PROGRAMS_PER_MULTIPROCESSOR[2 if halved else int(rows > 8)]
    count = multiprocessors or _MULTIPROCESSORS.get(arch, 132)
    seen: list[dict[str, int]] = []
    for tile_rows, stages, fill in _TILES:
        tile_rows = tile_rows or tall
        programs = int(fill * count * held)
        tiles = -(-N // tile_rows) * -(-M // rows)
        steps = -(-K // _STEP)
        num_warps = 4 if tile_rows >= (128 if halved else 64) else 2
        config = {
            "BM": rows,
            "BN": tile_rows,
            "BK": _STEP,
            "split_steps": split_steps(steps, tiles, programs, count, num_warps),
            "num_warps": num_warps,
            "num_stages": stages,
        }
        if config not in seen and fits(config):
            seen.append(config)
    splits = -(-steps_of(K, seen[0]) // seen[0]["split_steps"])
    what = f"{M} rows: reading codes costs a quarter of reading 16-bit weights; {splits} splits along K"
    return LinearPlan("fused", what, tuple(seen))


def in_registers(
    config: dict[str, int], step: int, arch: str = "90", *, pieces: int = 1, has_fallback: bool = False
) -> bool:
    """Whether the threads of a program hold the tiles of a product with a packed weight in registers: sums of a step
    and of all, decoded weights in pairs, and the other operand in so many pieces. Of what passes, compilers spill a few
    bytes at most on sm_90, sm_100 and sm_120."""
    warps, copies = config["num_warps"], 1
    # Instructions of a warp take both operands from registers, those of four read one from shared memory.
    if warps < 4 or arch not in _FOUR_WARPS:
        # Both passes over the other operand keep it, and so do its pieces.
        copies = 4 if has_fallback else 2 if warps < 4 or pieces > 1 else 1
    others = config["BM"] * step * pieces * copies
    values = 2 * config["BM"] * config["BN"] + config["BN"] * step // 2 + others
    return values <= _MOST_VALUES * 32 * warps


def order_of(arch: str, num_warps: int) -> int:
    """Of columns, as `gemm/decode_tile.py` has them, so that the threads that decode words of the weight are those from
    which tensor cores read them; otherwise it goes through shared memory."""
    if IN_REGISTERS or arch not in _FROM_REGISTERS:
        return 0
    return 1 if arch == "90" and num_warps >= 4 else 2


def split_steps(steps: int, tiles: int, programs: int, multiprocessors: int, warps: int) -> int:
    """Steps along K that a program takes, of so many for each tile, for a GPU that holds so many programs at once.

    The multiprocessor with the most programs is the last one, and the start and the end of a program take as long as a
    step. Of equal times the one with the fewest splits.
    """

    def time(splits: int) -> int:
        on_busiest = -(-tiles * splits // multiprocessors)
        alone = on_busiest * warps < _BUSY_WARPS
        return on_busiest * (-(-steps // splits) + 1) * (2 if alone else 1)

    most = max(1, min(programs // tiles, steps // _LEAST_STEPS, _MOST_SPLITS))
    return -(-steps // min(range(1, most + 1), key=time))


def steps_of(n_cols: int, config: dict[str, Any]) -> int:
    """Steps of ``BK`` columns in a row."""
    return -(-n_cols // config["BK"])


def layout_obstacle(n_cols: int, macro_block: int | str | None, macro_search: str) -> str | None:
    """Why the fused kernel cannot read a weight of ``n_cols`` columns; `None` when it can."""
    if -(-n_cols // 2) % 4:
        return f"rows of {n_cols} codes do not fill words of 32 bits"
    if macro_block == "row":
        return "macro blocks of whole rows have no place in a step of the fused kernel"
    if macro_block is not None and macro_search != "blockwise" and macro_block < 128:
        return f"macro blocks of {macro_block} elements are shorter than a step of the fused kernel"
    return None


def token_class(n_tokens: int) -> int:
    """The power of two from ``n_tokens`` up, at least 8: products of a class share their launch parameters."""
    return max(8, 1 << (n_tokens - 1).bit_length())


def _token_tile(n_tokens: int, arch: str) -> int:
    # NVIDIA's smallest tile of the right operand has 8 columns, AMD's 16.
    smallest = 16 if arch.startswith("gfx") else 8
    return min(64, max(smallest, token_class(n_tokens)))


def _halved(rows: int, arch: str) -> bool:
    """Whether a tile of 64 rows of the weight has two warps. From 16 rows of x on, four warps of compute capability 9.0
    multiply as a group, which Triton hands the decoded weight through shared memory; it comes to be read and written
    there for as long as decoding takes. Two warps multiply each from its registers, 8 rows of x at a time."""
    return IN_REGISTERS and arch == "90" and rows == 16


def _current_arch() -> str:
    import torch

    if not torch.cuda.is_available():
        return "90"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"{properties.major}{properties.minor}"
