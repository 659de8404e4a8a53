# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and SwiGLU that quantize, compiled, on real hardware: against torch and the eager definition on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mxfp4_kernels
from hf_mxfp4 import numerics


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SCRIPT = Path(__file__).parents[1] / "kernels" / "run_producers.py"


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("what", "cases"), [("norm", 105), ("swiglu", 120), ("layouts", 29), ("models", 9)])
def test_compiled_kernels_follow_torch_and_equal_the_definition(what, cases):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), what, "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mismatches"] == []
    assert report["cases"] == {what: cases}


@pytest.mark.parametrize("length", [1536, 4096, 5120, 8192, 12288])
def test_rows_of_models_depend_on_nothing_but_themselves(length):
    x = torch.randn(2000, length, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(length, device="cuda", dtype=torch.bfloat16)
    every = mxfp4_kernels.rms_norm_quantize(x, weight, residual=x, outputs=("packed", "normed"))
    one = mxfp4_kernels.rms_norm_quantize(x[1234:1235], weight, residual=x[1234:1235], outputs=("packed", "normed"))
    assert torch.equal(one.rstd, every.rstd[1234:1235])
    assert torch.equal(one.packed.codes, every.packed.codes[1234:1235])
    unit = (every.hidden.float() * every.rstd[:, None]).bfloat16()
    assert torch.equal(every.normed, weight * unit)
    exact = every.hidden.double().square().mean(-1).add(1e-6).rsqrt()
    assert (every.rstd.double() / exact - 1).abs().max() <= 2.0**-20


def test_more_than_2_to_the_31_elements():
    x = torch.randn(2**16 + 1, 2**15, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(2**15, device="cuda", dtype=torch.bfloat16)
    normed = mxfp4_kernels.rms_norm_quantize(x, weight, outputs=("packed", "normed"))
    gated = mxfp4_kernels.swiglu_quantize(x, x, outputs=("packed", "product"))
    for result, computed in ((normed, normed.normed), (gated, gated.product)):
        expected = numerics.quantize(computed[-1:].cpu())
        assert torch.equal(result.packed.codes[-1:].cpu(), expected.codes)
        assert torch.equal(result.packed.scale[-1:].cpu(), expected.scale)
    last = x[-1:].float()
    assert torch.equal(normed.normed[-1:], weight * (last * normed.rstd[-1:, None]).bfloat16())


def test_a_captured_graph_repeats_them():
    x, weight = torch.randn(16, 4096, device="cuda").bfloat16(), torch.rand(4096, device="cuda").bfloat16()

    def run() -> list[torch.Tensor]:
        normed = mxfp4_kernels.rms_norm_quantize(x, weight, residual=x)
        gated = mxfp4_kernels.swiglu_quantize(x)
        return [normed.hidden, normed.packed.codes, gated.packed.codes]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(torch.randn(16, 4096))
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(captured, run(), strict=True))
