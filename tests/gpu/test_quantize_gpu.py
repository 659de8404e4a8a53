# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels on real hardware against the eager definition on the CPU: `pytest tests/gpu`."""

import pytest
import torch
from compiled import report_of
from tiny_models import make_model

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig, numerics
from hf_mxfp4.backends import backend_for, self_check
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from mxfp4_kernels import Scheme, Side, fake_quantize_rows_and_columns


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("what", ["schemes", "layouts", "sides", "fp8", "property"])
def test_compiled_kernels_equal_eager_bit_for_bit(what):
    report = report_of("kernels/run_quantize.py", what, "cuda", timeout=900)
    assert report.get("mismatches", []) == []


def test_all_families_of_kernels_are_verified():
    device = torch.device("cuda", torch.cuda.current_device())
    assert set(self_check.states(device, check=True).values()) == {"checked"}


def test_the_automatic_backend_on_a_gpu_is_triton_and_gives_the_logits_of_eager():
    config = MXFP4RLConfig(preset="w4a4")
    assert backend_for("cuda", torch.float32, config.activation_scheme, "auto") == ("triton", None)
    ids = torch.arange(16, device="cuda").reshape(1, 16)
    logits = []
    for backend in ("triton", "eager"):
        model = make_model()
        quantize_linears(model, MXFP4RLConfig(preset="w4a4", backend=backend))
        with torch.no_grad():
            logits.append(model.cuda()(ids).logits)
    assert torch.equal(*logits)


def test_more_than_2_to_the_31_elements():
    x = torch.randn(2**16 + 1, 2**15, device="cuda", dtype=torch.bfloat16)
    packed = hf_mxfp4.quantize(x, macro_block=128, outlier_fallback=0.5, backend="triton")
    values = packed.dequantize()
    for row in (0, 2**15, 2**16):
        expected = numerics.quantize(x[row].cpu(), macro_block=128, outlier_fallback=0.5)
        assert torch.equal(packed.codes[row].cpu(), expected.codes)
        assert torch.equal(packed.macro[row].cpu(), expected.macro)
        assert torch.equal(values[row].cpu(), expected.dequantize())


def test_more_than_2_to_the_31_elements_in_both_directions():
    rows, cols = 2**16 + 32, 2**15
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    values, transposed = fake_quantize_rows_and_columns(x, Scheme(), Side(7), Side(None, 16))
    blocks = x[-32:].cpu()
    nearest = numerics.fake_quantize(blocks)
    assert (values[-32:].cpu().float() - nearest.float()).abs().max() <= blocks.float().abs().max() / 2
    for column in (0, 2**14, cols - 1):
        rotated = numerics.rotate(x[:, column].cpu().float(), 16)
        assert torch.equal(transposed[column].cpu(), numerics.fake_quantize(rotated).bfloat16())
