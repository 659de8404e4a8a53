# SPDX-License-Identifier: Apache-2.0
"""The compiled kernel on real hardware against the eager definition on the CPU: `pytest tests/gpu`."""

import pytest
import torch
from compiled import report_of
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.backends import backend_for
from hf_mxfp4.integrations.transformers.swap import quantize_linears


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_compiled_kernel_equals_eager_bit_for_bit(dtype):
    (report,) = report_of("kernels/run_interpreted.py", dtype, "cuda")
    assert report["mismatches"] == []
    assert report["cases"] > 252 and report["elements"] > 400_000


def test_the_automatic_backend_on_a_gpu_is_triton_and_gives_the_logits_of_eager():
    config = MXFP4RLConfig(preset="w4a4", macro_search="static")
    assert backend_for("cuda", torch.float32, config.activation_scheme, "auto") == ("triton", None)
    ids = torch.arange(16, device="cuda").reshape(1, 16)
    logits = []
    for backend in ("triton", "eager"):
        model = make_model()
        quantize_linears(model, MXFP4RLConfig(preset="w4a4", macro_search="static", backend=backend))
        with torch.no_grad():
            logits.append(model.cuda()(ids).logits)
    assert torch.equal(*logits)
