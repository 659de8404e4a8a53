# SPDX-License-Identifier: Apache-2.0
"""All compiled kernels on real hardware against the eager definition on the CPU, and the package on top of them."""

import pytest
import torch
from compiled import report_of

import hf_mxfp4
from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, numerics
from hf_mxfp4.backends import backend_for
from hf_mxfp4.numerics import QuantScheme


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


#: By scale rule: each compiles a quarter of about 1000 kernels.
SCHEMES = [(f"schemes-{rule}", cases) for rule, cases in (("rceil", 192), ("floor", 180), ("even", 180), ("mse", 192))]
PROPERTIES = [(f"property-{rule}", 0) for rule in ("rceil", "floor", "even", "mse")]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("what", "cases"), [*SCHEMES, ("layouts", 32), *PROPERTIES])
def test_compiled_kernels_equal_eager_bit_for_bit(what, cases):
    report = report_of("kernels/run_quantize.py", what, "cuda", timeout=900)
    assert report.get("mismatches", []) == []
    assert report.get("cases", 0) == cases


def test_more_than_2_to_the_31_elements():
    x = torch.randn(2**16 + 1, 2**15, device="cuda", dtype=torch.bfloat16)
    packed = hf_mxfp4.quantize(x, macro_block=128, outlier_fallback=0.5, backend="triton")
    values = packed.dequantize()
    for row in (0, 2**15, 2**16):
        expected = numerics.quantize(x[row].cpu(), macro_block=128, outlier_fallback=0.5)
        assert torch.equal(packed.codes[row].cpu(), expected.codes)
        assert torch.equal(packed.macro[row].cpu(), expected.macro)
        assert torch.equal(values[row].cpu(), expected.dequantize())


@pytest.mark.parametrize("scheme", ["mse", "rceil+mbs128-dynamic+of0.5", "even+mbs128-blockwise"])
def test_the_default_backend_on_a_gpu_packs_with_triton(scheme):
    scheme = numerics.parse_scheme(scheme)
    assert backend_for("cuda", torch.bfloat16, scheme, "auto") == ("triton", None)
    x = torch.randn(40, 200).bfloat16()
    packed, expected = hf_mxfp4.quantize(x.cuda(), **vars(scheme)), numerics.quantize(x, **vars(scheme))
    assert torch.equal(packed.codes.cpu(), expected.codes)
    assert torch.equal(packed.dequantize().cpu(), expected.dequantize())


def test_inputs_saved_as_codes_give_the_gradients_of_eager():
    gradients = []
    for backend in ("triton", "eager"):
        torch.manual_seed(0)
        config = MXFP4RLConfig(saved_activations="mxfp4", macro_search="static", backend=backend)
        layer = MXFP4Linear(160, 32, config=config).cuda()
        layer(torch.randn(9, 160, device="cuda")).square().sum().backward()
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


def test_tiles_of_a_weight_serve_both_products():
    w = torch.randn(64, 96, device="cuda")
    scheme = vars(QuantScheme("mse", block_rows=32))
    assert torch.equal(hf_mxfp4.fake_quantize(w, **scheme), hf_mxfp4.fake_quantize(w.T, **scheme).T)
