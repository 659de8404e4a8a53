# SPDX-License-Identifier: Apache-2.0
"""Compares the folding kernels with the eager definition, bit for bit; prints a JSON report.

TRITON_INTERPRET=1 python run_fold.py few      interpreted, of the searches for a factor one
TRITON_INTERPRET=1 python run_fold.py all      interpreted
python run_fold.py cuda                        compiled, on a GPU
"""

import itertools
import json
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from run_interpreted import adversarial_rows

import mxfp4_kernels
from hf_mxfp4 import numerics
from hf_mxfp4.backends.select import rotate_rows
from mxfp4_kernels.e4m3 import fold


WHAT = sys.argv[1] if len(sys.argv) > 1 else "few"
DEVICE = "cuda" if WHAT == "cuda" else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MACROS = ((None, "static"), (128, "static"), (128, "dynamic"))
SHAPES = ((5, 270), (3, 33), (130, 40), (1, 128), (9, 1))
Case = tuple[str, torch.Tensor, dict]


def schemes() -> Iterator[dict]:
    for rule, (macro, search) in itertools.product(("rceil", "floor", "even", "mse"), MACROS):
        yield {"scale_rule": rule, "macro_block": macro, "macro_search": search}


def data(shape: tuple[int, int], dtype: torch.dtype, number: int) -> torch.Tensor:
    """Rows that break quantizers, and columns of all sizes, so that some blocks are far below others."""
    rng = torch.Generator().manual_seed(number)
    if number % 2:
        return adversarial_rows(shape, dtype, number, rng)
    lowest = -20 if dtype == torch.float16 else -60
    exponents = torch.linspace(0, lowest, shape[1])[torch.randperm(shape[1], generator=rng)]
    return (torch.randn(shape, generator=rng) * torch.exp2(exponents)).to(dtype)


def cases() -> Iterator[Case]:
    for number, scheme in enumerate(schemes()):
        if WHAT == "few" and scheme["macro_search"] == "dynamic" and scheme["scale_rule"] != "mse":
            continue
        shape = SHAPES[number % len(SHAPES)]
        yield f"{shape}", data(shape, DTYPES[number % 3], number), scheme
        if DEVICE != "cpu":
            yield f"{shape}", data(shape, DTYPES[(number + 1) % 3], number + 1), scheme
    wide = data((140, 421), torch.bfloat16, 1)
    plain = {"scale_rule": "rceil", "macro_block": None, "macro_search": "static"}
    yield "row stride", wide[:20:2, 100:300], plain
    yield "every second column", wide[:9, 0:256:2], plain
    yield "transposed", wide[:, :30].T, plain
    # Two elements an instruction.
    yield "words", data((5, 270), torch.bfloat16, 4), plain | {"scale_rule": "floor"}
    yield "words", data((20, 134), torch.bfloat16, 5), plain | {"macro_block": 128}
    yield "words", data((3, 130), torch.bfloat16, 6), plain | {"macro_block": 128}
    yield "words of whole blocks", data((37, 160), torch.bfloat16, 7), plain
    yield "no rows", wide[:0], plain
    yield "no columns", wide[:, :0], plain
    yield "one row of many tiles", data((1, 2300), torch.bfloat16, 2), plain


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, NaN and NaN apart."""
    actual = actual.cpu()
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    equal = actual.contiguous().view(integers) == expected.contiguous().view(integers)
    return bool((equal | (actual.float().isnan() & expected.float().isnan())).all())


def wrong_parts(actual, expected: numerics.FoldedOperand) -> list[str]:
    found = [name for name in ("elements", "scale") if not same(getattr(actual, name), getattr(expected, name))]
    return found + ["length"] * (actual.length != expected.length)


def compare() -> dict:
    report = {"cases": 0, "mismatches": [], "inexact": 0, "nan": 0, "pairs": 0}
    in_pairs = fold.in_pairs

    def counted(*arguments) -> bool:
        found = in_pairs(*arguments)
        report["pairs"] += found
        return found

    fold.in_pairs = counted
    for label, x, options in cases():
        on_device = x.to(DEVICE)
        plain = options["macro_block"] is None
        row = numerics.quantize(x, **options)
        column = numerics.quantize(x, axis=0, **options)
        checks = []
        for group in (128, "row") if plain else (128,):
            for axis, tensor in ((1, row), (0, column)):
                folded = mxfp4_kernels.fold_e4m3(on_device, group=group, axis=axis, **options)
                checks.append((f"{group}, axis {axis}", folded, numerics.fold(tensor, group), folded.n_inexact))
        both = mxfp4_kernels.fold_e4m3_both(on_device, **options)
        expected = numerics.fold(row, 128), numerics.fold(column, 128)
        checks += [(f"both {i}", f, e, None) for i, (f, e) in enumerate(zip(both, expected, strict=True))]
        if int(both[0].n_inexact) != int(expected[0].n_inexact + expected[1].n_inexact):
            report["mismatches"].append(f"{label} {options}: both, counter")
        for name, folded, expected, counter in checks:
            wrong = wrong_parts(folded, expected)
            if counter is not None and int(counter) != int(expected.n_inexact):
                wrong.append(f"counter {int(counter)} != {int(expected.n_inexact)}")
            report["inexact"] += int(expected.n_inexact)
            report["nan"] += int(expected.elements.float().isnan().sum())
            report["mismatches"] += [f"{label} {options} {x.dtype} {name}: {part}" for part in wrong]
        if plain:
            report["mismatches"] += [f"{label} {options}: {what}" for what in reused(x, row) + fp8(x)]
        report["cases"] += 1
    report["mismatches"] += values() + of_experts()
    # Columns of several parts, the last of one row; rows of several tiles.
    long = data((1025, 20), torch.bfloat16, 2)
    report["mismatches"] += [f"long {what}" for what in fp8(long) + fp8(data((2, 9000), torch.float32, 1))]
    report["mismatches"] += tiles()
    report["sides"], wrong = rotated_and_stochastic()
    report["mismatches"] += wrong
    return report


def reused(x: torch.Tensor, tensor: numerics.MXFP4Tensor) -> list[str]:
    """The values that blocks along rows have, folded along the columns."""
    rows, columns = mxfp4_kernels.fold_e4m3_both(
        x.to(DEVICE), columns="reused", scale_rule=tensor.scheme.scale_rule.value
    )
    expected = numerics.fold_across(tensor)
    n_inexact = int(numerics.fold(tensor, 128).n_inexact + expected.n_inexact)
    wrong = wrong_parts(columns, expected) + wrong_parts(rows, numerics.fold(tensor, 128))
    none, alone = mxfp4_kernels.fold_e4m3_both(
        x.to(DEVICE), columns="reused", rows=False, scale_rule=tensor.scheme.scale_rule.value
    )
    wrong += [f"{part} alone" for part in wrong_parts(alone, expected)] + ["rows"] * (none is not None)
    packed, beside = mxfp4_kernels.fold_e4m3_both(
        x.to(DEVICE), columns="reused", rows="codes", scale_rule=tensor.scheme.scale_rule.value
    )
    wrong += [f"{part} beside codes" for part in wrong_parts(beside, expected)]
    wrong += [part for part in ("codes", "scale") if not same(getattr(packed, part), getattr(tensor, part))]
    wrong += ["counter alone"] * (int(alone.n_inexact) != int(expected.n_inexact))
    return [f"reused {part}" for part in wrong] + ["reused counter"] * (int(rows.n_inexact) != n_inexact)


def fp8(x: torch.Tensor) -> list[str]:
    wrong = []
    for axis, matrix in ((1, x), (0, x.T)):
        if not x.numel():
            continue
        elements, byte = numerics.quantize_e4m3(matrix)
        folded = mxfp4_kernels.quantize_e4m3(x.to(DEVICE), axis=axis)
        parts = {"elements": folded.elements[:, : matrix.shape[1]], "padding": folded.elements[:, matrix.shape[1] :]}
        nan_rows = byte == 255
        ok = same(parts["elements"], elements) and same(folded.scale, numerics.decode_e8m0(byte))
        padding = parts["padding"].cpu().float()
        ok &= bool(((padding == 0) | nan_rows).all())
        wrong += [] if ok else [f"fp8 axis {axis}"]
        values = mxfp4_kernels.fake_quantize_e4m3(matrix.to(DEVICE) if axis else x.to(DEVICE).T)
        wrong += [] if same(values, numerics.fake_quantize_e4m3(matrix)) else [f"values of fp8 axis {axis}"]
    return wrong + kept_fp8(x) + (fp8_of_both(x) if x.numel() else [])


def kept_fp8(x: torch.Tensor) -> list[str]:
    """Rows with their scale bytes, and back."""
    stored, wanted = mxfp4_kernels.quantize_e4m3_rows(x.to(DEVICE)), numerics.quantize_e4m3(x)
    names = ("elements", "bytes")
    wrong = [f"kept fp8: {n}" for n, *pair in zip(names, stored, wanted, strict=True) if not same(*pair)]
    for dtype in DTYPES:
        values = mxfp4_kernels.dequantize_e4m3(*stored, dtype)
        wrong += [] if same(values, numerics.dequantize_e4m3(*wanted, dtype)) else [f"kept fp8 as {dtype}"]
    return wrong


def fp8_of_both(x: torch.Tensor) -> list[str]:
    """Rows and columns from one matrix, with a scale for every 128 elements."""
    wrong = []
    folded, values = (
        function(x.to(DEVICE)) for function in (mxfp4_kernels.quantize_e4m3_both, mxfp4_kernels.fake_quantize_e4m3_both)
    )
    for name, matrix, found, value in zip(("rows", "columns"), (x, x.T), folded, values, strict=True):
        elements, byte = numerics.quantize_e4m3(matrix)
        scale = numerics.decode_e8m0(byte).expand(-1, -(-matrix.shape[1] // 128))
        padding = found.elements[:, matrix.shape[1] :].cpu().float()
        ok = same(found.elements[:, : matrix.shape[1]], elements) and same(found.scale, scale)
        ok &= found.scale.t().is_contiguous() and bool(((padding == 0) | (byte == 255)).all())
        wrong += [] if ok else [f"fp8 of both, {name}"]
        wrong += [] if same(value, numerics.fake_quantize_e4m3(matrix)) else [f"values of fp8 of both, {name}"]
    return wrong


def of_experts() -> list[str]:
    """Along the tokens of each expert: E4M3 of its columns and their values, and MXFP4 values folded."""
    wrong = []
    for number, (counts, columns, dtype) in enumerate(
        (
            ((3, 0, 130, 1), 96, torch.bfloat16),
            ((0, 5), 300, torch.float32),
            # More slots than are looked at together, and the last expert without rows.
            ((128, 2100, 0), 34, torch.float16),
        )
    ):
        x, ends = data((sum(counts), columns), dtype, number), torch.tensor(counts).cumsum(0, dtype=torch.int32)
        given = x.to(DEVICE), ends.to(DEVICE)
        rows, along, padded = mxfp4_kernels.grouped_quantize_e4m3(*given)
        none, alone, _ = mxfp4_kernels.grouped_quantize_e4m3(*given, rows=False)
        values, folded = mxfp4_kernels.grouped_fake_quantize_e4m3(*given), mxfp4_kernels.grouped_fold_e4m3(*given)
        elements, byte = numerics.quantize_e4m3(x)
        ok = (
            same(rows.elements[:, :columns], elements) and same(rows.scale, numerics.decode_e8m0(byte)) and none is None
        )
        found, start, first, n_inexact = ["rows"] * (not ok), 0, 0, 0
        for expert, count in enumerate(counts):
            own, size = x[start : start + count], count + -count % 128
            slots, tokens = slice(first // 128, (first + size) // 128), slice(first, first + size)
            if count:
                elements, byte = numerics.quantize_e4m3(own.t())
                scale = numerics.decode_e8m0(byte).expand(-1, size // 128)
                for name, part in (("", along), (" alone", alone)):
                    padding = part.elements[:, first + count : first + size].cpu().float()
                    ok = same(part.elements[:, first : first + count], elements) and same(part.scale[:, slots], scale)
                    ok &= bool(((padding == 0) | (byte == 255)).all())
                    found += [f"columns{name} of expert {expert}"] * (not ok)
                ok = same(values[start : start + count], numerics.fake_quantize_e4m3(own.t()).t())
                found += [f"values of expert {expert}"] * (not ok)
                wanted = numerics.fold_across(numerics.quantize(F.pad(own, (0, 0, 0, size - count))))
                n_inexact += int(wanted.n_inexact)
                ok = same(folded.elements[:, tokens], wanted.elements) and same(folded.scale[:, slots], wanted.scale)
                found += [f"folded of expert {expert}"] * (not ok)
            start, first = start + count, first + size
            found += [f"end of expert {expert}"] * (int(padded[expert]) != first)
        found += ["counter"] * (int(folded.n_inexact) != n_inexact)
        wrong += [f"experts {counts}, {dtype}: {part}" for part in found]
    return wrong


def values() -> list[str]:
    """MXFP4 values beside what is folded, of rows in one tile and in several."""
    wrong = []
    for number, (shape, dtype, group, scheme) in enumerate(
        (
            ((5, 270), torch.bfloat16, "row", {}),
            ((2, 2300), torch.bfloat16, "row", {"scale_rule": "floor"}),
            ((3, 100), torch.float16, "row", {"scale_rule": "even"}),
            ((5, 270), torch.bfloat16, 128, {"macro_block": 128}),
            ((9, 300), torch.float32, 128, {"macro_block": 128, "macro_search": "dynamic"}),
        )
    ):
        x = data(shape, dtype, 2 * number + 1)
        folded = mxfp4_kernels.fold_e4m3(x.to(DEVICE), group=group, values=True, **scheme)
        tensor = numerics.quantize(x, **scheme)
        found = wrong_parts(folded, numerics.fold(tensor, group))
        found += ["values"] * (not same(folded.values, numerics.fake_quantize(x, **scheme)))
        wrong += [f"with values, {shape} {dtype} {scheme}: {part}" for part in found]
    return wrong


def tiles() -> list[str]:
    """Blocks of 32 rows: one quantization, two orientations."""
    wrong = []
    for shape, rule in (((40, 150), "rceil"), ((64, 256), "mse"), ((3, 33), "floor")):
        x = data(shape, torch.float32, 4)
        x[5:, :64] = 0
        for axis in (1, 0):
            expected = numerics.quantize(x, scale_rule=rule, block_rows=32, axis=axis)
            for group in (128, "row"):
                folded = mxfp4_kernels.fold_e4m3(x.to(DEVICE), group=group, axis=axis, scale_rule=rule, block_rows=32)
                found = wrong_parts(folded, numerics.fold(expected, group))
                found += ["counter"] * (int(folded.n_inexact) != int(numerics.fold(expected, group).n_inexact))
                wrong += [f"tiles {shape} {rule} axis {axis} {group}: {part}" for part in found]
    return wrong


#: Shape, dtype, scheme; of rows and of columns: rotation, whether signs are random, seed of stochastic rounding.
SIDES = (
    ((6, 130), torch.bfloat16, {}, (16, True, None), (64, False, 3)),
    ((33, 50), torch.float32, {"scale_rule": "even", "macro_block": 128}, (None, False, 2**63 + 5), (128, True, None)),
    ((1, 300), torch.float16, {"scale_rule": "mse"}, (32, True, 7), (None, False, 11)),
    ((130, 2), torch.bfloat16, {"macro_block": 128, "macro_search": "dynamic"}, (None, False, None), (16, False, None)),
)


def rotated_and_stochastic() -> tuple[int, list[str]]:
    """Rotations and random numbers along one axis, or a pair of both."""
    count, wrong = 0, []
    for number, (shape, dtype, scheme, *sides) in enumerate(SIDES):
        x = data(shape, dtype, 2 * number + (number == 3))
        x.flatten()[0] = 2.0**-126  # in a block of byte 0, which counts when it is not rounded to zeros
        options, expected, n_inexact = [], [], 0
        for matrix, (size, random, seed) in zip((x, x.T), sides, strict=True):
            padded = matrix.shape[1] + -matrix.shape[1] % (size or 1)
            signs = numerics.random_signs(padded, number) if random else None
            rotation = numerics.Rotation(size, random) if size else None
            rounding = "nearest" if seed is None else "stochastic"
            options.append({"rounding": rounding, "seed": seed, "rotation": size, "signs": signs})
            turned = matrix if rotation is None else rotate_rows(matrix, rotation.size, signs=signs)
            quantized = numerics.quantize(turned.contiguous(), rounding=rounding, seed=seed, **scheme)
            expected.append(numerics.fold(quantized, 128))
            n_inexact += int(expected[-1].n_inexact)
            axis = 1 if matrix is x else 0
            arguments = {name: on_device(value) for name, value in options[-1].items()} | scheme
            groups = (128,) if "macro_block" in scheme else (128, "row")
            for group in groups:
                folded = mxfp4_kernels.fold_e4m3(x.to(DEVICE), group=group, axis=axis, **arguments)
                wanted = numerics.fold(quantized, group)
                found = wrong_parts(folded, wanted) + ["counter"] * (int(folded.n_inexact) != int(wanted.n_inexact))
                wrong += [f"side {number}, {axis=}, {group}: {part}" for part in found]
                count += 1
        pairs = {name: tuple(on_device(side[name]) for side in options) for name in options[0]}
        both = mxfp4_kernels.fold_e4m3_both(x.to(DEVICE), **pairs, **scheme)
        for i, (folded, wanted) in enumerate(zip(both, expected, strict=True)):
            wrong += [f"sides {number}, both {i}: {part}" for part in wrong_parts(folded, wanted)]
        wrong += [f"sides {number}, both: counter"] * (int(both[0].n_inexact) != n_inexact)
        count += 1
    x = data((40, 150), torch.float32, 4)
    tensor = numerics.quantize(x, rounding="stochastic", seed=9)
    reused = mxfp4_kernels.fold_e4m3_both(
        x.to(DEVICE), columns="reused", rounding=("stochastic", "nearest"), seed=(9, None)
    )
    wanted = numerics.fold(tensor, 128), numerics.fold_across(tensor)
    for folded, one in zip(reused, wanted, strict=True):
        wrong += [f"reused stochastic: {part}" for part in wrong_parts(folded, one)]
    packed, folded = mxfp4_kernels.fold_e4m3_both(
        x.to(DEVICE), columns="reused", rows="codes", rounding=("stochastic", "nearest"), seed=(9, None)
    )
    wrong += [f"stochastic beside codes: {part}" for part in wrong_parts(folded, wanted[1])]
    wrong += ["stochastic codes"] * (not same(packed.codes, tensor.codes))
    return count + 1, wrong


def on_device(value: object) -> object:
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    print(json.dumps(compare()))
