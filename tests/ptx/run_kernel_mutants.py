# SPDX-License-Identifier: Apache-2.0
"""Small faults made on purpose in kernels, to see which of them the executed PTX shows; prints a JSON report.

    python run_kernel_mutants.py 80            all of them
    python run_kernel_mutants.py 80 30 38      those of these numbers

Those marked `COMPILED` are in code that Triton's interpreter never runs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
ARCH, CHOSEN = sys.argv[1], [*map(int, sys.argv[2:])]
COMPILED = "compiled only"
#: File, text that is there once, what replaces it, and `COMPILED`.
MUTANTS = [
    ("common/bf16x2.py", '"max.NaN.bf16x2 $0, $1, $2;"', '"max.bf16x2 $0, $1, $2;"', COMPILED),
    ("common/bf16x2.py", '"max.NaN.bf16x2 $0, $1, $2;"', '"min.NaN.bf16x2 $0, $1, $2;"', COMPILED),
    ("common/bf16x2.py", '"max.NaN.bf16x2 $0, $1, $2;"', '"max.NaN.bf16x2 $0, $1, $1;"', COMPILED),
    ("common/bf16x2.py", '"min.bf16x2 $0, $1, $2;"', '"max.bf16x2 $0, $1, $2;"', COMPILED),
    ("common/bf16x2.py", '"min.bf16x2 $0, $1, $2;"', '"min.bf16x2 $0, $1, $1;"', COMPILED),
    ("common/bf16x2.py", '"min.bf16x2 $0, $1, $2;"', '"min.bf16x2 $0, $2, $2;"', COMPILED),
    ("common/bf16x2.py", '"fma.rn.f16x2 $0, $1, $2, $3;"', '"fma.rn.bf16x2 $0, $1, $2, $3;"', COMPILED),
    ("common/bf16x2.py", '"fma.rn.f16x2 $0, $1, $2, $3;"', '"fma.rn.f16x2 $0, $1, $3, $2;"', COMPILED),
    ("common/bf16x2.py", '"fma.rn.bf16x2 $0, $1, $2, $3;"', '"fma.rn.f16x2 $0, $1, $2, $3;"', COMPILED),
    ("common/bf16x2.py", '"fma.rn.bf16x2 $0, $1, $2, $3;"', '"fma.rn.bf16x2 $0, $1, $2, $2;"', COMPILED),
    ("common/bf16x2.py", '"fma.rn.bf16x2 $0, $1, $2, $3;"', '"fma.rn.bf16x2 $0, $1, $1, $3;"', COMPILED),
    ("common/bf16x2.py", "a, b, -0x7FFF8000, INTERPRETED, F16", "a, b, -0x7FFF7000, INTERPRETED, F16", ""),
    ("common/bf16x2.py", '"prmt.b32 $0, $1, $2, $3;"', '"prmt.b32 $0, $2, $1, $3;"', COMPILED),
    ("common/bf16x2.py", '"prmt.b32 $0, $1, $2, $3;"', '"prmt.b32 $0, $1, $1, $3;"', COMPILED),
    ("common/bf16x2.py", '"prmt.b32 $0, $1, $2, $3;"', '"prmt.b32 $0, $1, $2, 0x7531;"', COMPILED),
    ("common/bf16x2.py", "dp4a.u32.s32 $0, $1, $2, $3;", "dp4a.u32.u32 $0, $1, $2, $3;", COMPILED),
    ("common/bf16x2.py", "dp4a.u32.s32 $0, $1, $2, $3;", "dp4a.u32.s32 $0, $2, $1, $3;", COMPILED),
    ("common/bf16x2.py", "dp4a.u32.u32 $0, $1, $2, $3;", "dp4a.u32.s32 $0, $1, $2, $3;", COMPILED),
    ("common/bf16x2.py", "dp4a.u32.u32 $0, $1, $2, $3;", "dp4a.u32.u32 $0, $1, $1, $3;", COMPILED),
    ("common/bf16x2.py", "mask = (rows < n_rows) & (offsets", "mask = (rows <= n_rows) & (offsets", ""),
    ("common/bf16x2.py", "(offsets < (n_cols - col_start) // 2)", "(offsets <= (n_cols - col_start) // 2)", ""),
    ("common/bf16x2.py", "rows * (x_row_stride // 2) + offsets", "rows * (x_row_stride // 2) + offsets + 1", ""),
    ("common/bf16x2.py", "_load_eight(pointers, mask, 4)", "_load_eight(pointers, mask, 8)", ""),
    ("common/bf16x2.py", "_load_eight(pointers, mask, 12)", "_load_eight(pointers, mask, 16)", ""),
    ("common/bf16x2.py", "BLOCKS)[None, None, :, None]) * 16", "BLOCKS)[None, None, :, None]) * 8", ""),
    ("common/bf16x2.py", "* BLOCKS\n    offsets", "* BLOCKS + 1\n    offsets", ""),
    ("common/bf16x2_blocks.py", "a, c = bytes_of(a, b, 0x7351", "a, c = bytes_of(a, b, 0x7315", ""),
    ("common/bf16x2_blocks.py", "0x5410", "0x5401", ""),
    ("common/bf16x2_blocks.py", "0x7632", "0x7623", ""),
    ("common/bf16x2_blocks.py", "t + 0x00FF00FF", "t + 0x00FF0100", ""),
    ("common/bf16x2_blocks.py", "_LEAST_TOP = tl.constexpr(0x0140)", "_LEAST_TOP = tl.constexpr(0x0141)", ""),
    ("common/bf16x2_blocks.py", "codes + 0x77777777", "codes + 0x67777777", ""),
    ("common/bf16x2_blocks.py", "_NAN = tl.constexpr(0x7FC07FC0)", "_NAN = tl.constexpr(0x7FC07F80)", ""),
    ("common/bf16x2_blocks.py", "minus = _steps(byte, mantissa) | _SIGNS", "minus = _steps(byte, mantissa)", ""),
    ("common/bf16x2_blocks.py", "digits >> (1 - tl.minimum(byte, 1))", "digits >> (0 - tl.minimum(byte, 0))", ""),
    ("common/blocks.py", "return tl.fma(a, b, c)", "return a * b + c", COMPILED),
    ("common/blocks.py", "return tl.fma(a, b, c)", "return tl.fma(a, b, -c)", COMPILED),
    ("common/blocks.py", "high = 1.0 / factor", "high = 1.0001 / factor", ""),
    ("common/blocks.py", "_FAST_DIVISION_BITS = tl.constexpr(19 << 23)", "_FAST_DIVISION_BITS = tl.constexpr(1)", ""),
    ("common/blocks.py", "bits = tl.where(byte == 0, _BYTE_ZERO_BITS, byte << 23)", "bits = byte << 23", ""),
    ("common/blocks.py", "(ratio.to(tl.int32, bitcast=True) >> 15)", "(ratio.to(tl.int32, bitcast=True) >> 16)", ""),
    ("quantization.py", "(cols < n_cols - col_start)", "(cols <= n_cols - col_start)", ""),
    ("quantization.py", "mask = (rows < n_rows) &", "mask = (rows <= n_rows) &", ""),
    ("quantization.py", "x_ptr + col_start + rows * x_row_stride", "x_ptr + rows * x_row_stride", ""),
    ("quantization.py", "a = tl.join(tl.join(a00, a01)", "a = tl.join(tl.join(a01, a00)", ""),
    ("quantization.py", "start = col_start + strip * TILE.STRIP", "start = col_start", ""),
    ("fp8.py", "_ROUND_MAGIC = tl.constexpr(1.5 * 2.0**20)", "_ROUND_MAGIC = tl.constexpr(1.5 * 2.0**19)", ""),
    ("fp8.py", "(magnitude >> 20) - 960", "(magnitude >> 20) - 961", ""),
    ("fp8.py", "+ 0x1FFFFF) >> 23) - 8", "+ 0x0FFFFF) >> 23) - 8", ""),
    ("fp4.py", "at_row * n_macros + block // 4", "at_row * n_macros + block // 8", ""),
    ("fp4.py", "16 * (row % 32) + 4 * (row // 32)", "16 * (row % 32) + 8 * (row // 32)", ""),
    ("fp4.py", "inside = (at_row < n_rows) & (block < n_blocks)", "inside = (at_row < n_rows)", ""),
    ("decode/tile.py", "mov.b32 zero, 0x80008000", "mov.b32 zero, 0x3f803f80", COMPILED),
    ("decode/tile.py", "fma.rn.bf16x2 $0, $1, $2, zero", "fma.rn.bf16x2 $0, $1, $1, zero", COMPILED),
    ("decode/tile.py", "fma.rn.bf16x2 $0, $1, $2, zero", "fma.rn.f16x2 $0, $1, $2, zero", COMPILED),
    ("decode/tile.py", '"rcp.approx.ftz.f32 $0, $1;"', '"mov.f32 $0, $1;"', COMPILED),
    ("decode/tile.py", "(words & 0x00F000F0) * 0x0104", "(words & 0x00F000F0) * 0x0102", ""),
    ("decode/tile.py", "_NAN_BITS = tl.constexpr(0x7FC0)", "_NAN_BITS = tl.constexpr(0x7F00)", ""),
    ("decode/tile.py", "factor = (narrow + 126) * (_BOTH << 7)", "factor = (narrow + 125) * (_BOTH << 7)", ""),
    ("decode/tile.py", "bits.to(tl.int16).to(tl.bfloat16", "bits.to(tl.int16).to(tl.float16", COMPILED),
    ("decode/tile.py", 'sem="acq_rel") == n_splits - 1', 'sem="acq_rel") == n_splits', ""),
    ("decode/product.py", "(words_at < K // 8 - k // 8)", "(words_at <= K // 8 - k // 8)", ""),
    ("decode/product.py", "(ks < K - k)[None, :]", "(ks <= K - k)[None, :]", ""),
    ("decode/product.py", "if largest > NARROW_BYTE:", "if largest > NARROW_BYTE + 99:", ""),
    ("decode/product.py", "places * macros_per_row + first", "places + first", ""),
    ("decode/product.py", "inside = (columns < N)[:, None]", "inside = (columns <= N)[:, None]", ""),
]


def find(tree: Path, file: str) -> str | None:
    """What shows that the kernels in a folder, of which one file changed, are wrong."""
    cases = (
        "few_converted" if file.startswith("fp") else "few_decoded" if file.startswith("decode") else "few_quantized"
    )
    path = os.pathsep.join((str(tree), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(HERE / "run_executed.py"), ARCH, cases]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][:200]
    return next(iter(json.loads(done.stdout)["wrong"]), None)


if __name__ == "__main__":
    report = {"not found": {}, "found": {}}
    with tempfile.TemporaryDirectory() as folder:
        for number in CHOSEN or range(len(MUTANTS)):
            file, old, new, only = MUTANTS[number]
            tree = Path(folder) / str(number)
            shutil.copytree(KERNELS, tree)
            path = tree / "mxfp4_kernels" / file
            before, parts, after = path.read_text().partition(old)
            if not parts:
                raise ValueError(f"{file} has no {old!r}")
            path.write_text(before + new + after)
            name, found = f"{file}: {old} -> {new}", find(tree, file)
            report["not found" if found is None else "found"][name] = [found, only]
            print(number, found, name, file=sys.stderr, flush=True)
    print(json.dumps(report))
