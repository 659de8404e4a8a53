# SPDX-License-Identifier: Apache-2.0
"""Compares kernels with their definitions as the scripts in `tests/kernels` do, but compiled and their PTX executed;
prints what is wrong as JSON.

    python run_executed.py 80 few               a few cases of every kernel
    python run_executed.py 80 schemes           a mode of run_quantize.py
    python run_executed.py 80 decode            the cases of run_decode.py
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path


HERE = Path(__file__).resolve().parent
ARCH, MODE = sys.argv[1:]
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "kernels")]
# The scripts read their own arguments when they are imported.
sys.argv[1:] = ["few"]

import run_decode  # noqa: E402
import run_quantize  # noqa: E402
import torch  # noqa: E402

from hf_mxfp4.numerics import parse_scheme  # noqa: E402
from ptx.device import executed  # noqa: E402


def few_quantized() -> Iterator[tuple[str, object]]:
    rng = torch.Generator().manual_seed(1)
    x = run_quantize.adversarial_rows((20, 160), torch.float32, 0, rng)
    # Blocks at the least scales, with codes other than zero.
    x[15] = x[0] * 2.0 ** (torch.arange(160) // 32 - 127)
    for text, dtype in (("rceil", torch.bfloat16), ("even+mbs128-blockwise+of1", torch.bfloat16)):
        yield text, run_quantize.wrong(x.to(dtype), parse_scheme(text), {}, dtype)
    # Several tiles, strips and blocks, cut short.
    odd = torch.cat((x[11:16], x[1:6, :110]), dim=1)
    yield "odd", run_quantize.wrong(odd, parse_scheme("rceil+mbs32-static+of0.3"), {}, torch.float32)
    yield "both", run_quantize.wrong_both(x[:, :70], parse_scheme("rceil"), ({"seed": 5}, {"rotation": 32}), x.dtype)


def few_converted() -> Iterator[tuple[str, object]]:
    rng = torch.Generator().manual_seed(2)
    odd = run_quantize.adversarial_rows((5, 70), torch.float16, 2, rng)
    # A maximum between the largest E4M3 number and that of its binade.
    odd[0] = torch.linspace(-1.85, 1.85, 70)
    yield "FP8", run_quantize.wrong_fp8(odd)
    yield from itertools.islice(run_quantize.nvfp4(rng), 2)


def few_decoded() -> Iterator[tuple[str, object]]:
    for cases, count in ((run_decode.linear(), 3), (run_decode.experts(), 5)):
        yield from itertools.islice(cases, count)


def few() -> Iterator[tuple[str, object]]:
    return itertools.chain(few_quantized(), few_converted(), few_decoded())


def decode() -> Iterator[tuple[str, object]]:
    return itertools.chain(run_decode.linear(), run_decode.experts(), run_decode.special())


if __name__ == "__main__":
    cases = {"few": few, "decode": decode}.get(MODE) or getattr(run_quantize, MODE)
    with executed(int(ARCH)) as launched:
        found = list(cases())
    wrong = {name: bad for name, bad in found if bad}
    print(json.dumps({"cases": len(found), "wrong": wrong, "kernels": sorted(set(launched))}))
