# SPDX-License-Identifier: Apache-2.0
"""How many kernels layers launch, in training and for a token, on GPUs that need not be there."""

import warnings

import pytest
import torch
from compile_targets import first_target


#: Kernels of ours and of torch in both passes of a trained linear layer, at most.
TRAINED = {
    "w4a4": 7,
    "w4a4, default": 6,
    "w4a4g8": 13,
    "w4a4g8, macro 128": 10,
    "w4a4g8, default": 9,
    "w4a4g4": 8,
    "w4a4g4, macro 128": 8,
    "w4a4g4, default": 8,
}
#: In a call of a layer on packed weights, for one token.
DECODED = {"decode, packed w4a16": 1, "decode, packed w4a4": 2, "decode, packed + LoRA": 3}
#: More than in bfloat16, for one token through a decoder layer of seven linear layers. Inputs of q, k and v are
#: quantized once, as are those of gate and up.
TOKEN = {"token, packed w4a16": 0, "token, packed w4a4": 4, "token, QAT w4a4": 4, "token, packed + LoRA": 14}


@pytest.mark.parametrize("gpu", first_target("H100", "B200", "RTX 5090", "MI355X"))
def test_launches(run_script, gpu):
    found = run_script("run_launches.py", gpu, interpret=False)
    for name, most in TRAINED.items():
        launched = found[name]["forward"] + found[name]["backward"]
        assert 5 <= len(launched) <= most, (name, launched)
    for name, count in DECODED.items():
        assert len(found[name]) == count, (name, found[name])
    # The adapter's two products and their sum, both ways; the frozen weight has no gradient.
    assert len(found["training, packed + LoRA"]) <= 14
    plain = len(found["token, bf16"])
    assert plain > 30
    for name, more in TOKEN.items():
        assert len(found[name]) - plain == more, (name, found[name])


def test_products_of_an_h100_are_those_of_torch(run_script):
    found = run_script("run_launches.py", "H100", interpret=False)
    for name, (forward, backward) in {"w4a4": (1, 0), "w4a4g4": (1, 2), "w4a4g8": (1, 2)}.items():
        counts = [found[name][part].count("_scaled_mm_v2") for part in ("forward", "backward")]
        assert counts == [forward, backward], (name, found[name])


def test_a_product_that_torch_refuses_is_asked_for_once(monkeypatch):
    from mxfp4_kernels.gemm import matmul

    asked = []

    def refuse(*arguments, **options):
        asked.append(arguments)
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhere")

    monkeypatch.setattr(matmul, "_refused", set())
    monkeypatch.setattr(matmul, "_cuda_has_blocks", lambda: True)
    monkeypatch.setattr(matmul.F, "scaled_mm", refuse)
    a, b = (torch.zeros(rows, 256, dtype=torch.float8_e4m3fn) for rows in (16, 32))
    scales = torch.ones(2, 16), torch.ones(2, 32)
    with pytest.warns(UserWarning, match=r"scales by 128 on cpu \(CUBLAS_STATUS_NOT_SUPPORTED\); ours is used"):
        assert matmul._by_groups_of_torch(a, b, *scales) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert matmul._by_groups_of_torch(a, b, *scales) is None
    ((_, right, left_scale, _, right_scale, _),) = asked
    # As cuBLASLt reads them: rows are neighbours.
    assert left_scale.shape == (16, 2) and left_scale.stride() == (1, 16)
    assert right.shape == (256, 32) and right_scale.shape == (32, 2) and right_scale.stride() == (1, 32)


@pytest.mark.parametrize(("version", "expected"), [("12.8", False), ("12.9", True), ("13.0", True), (None, False)])
def test_the_cuda_that_knows_scales_by_128(monkeypatch, version, expected):
    from mxfp4_kernels.gemm import matmul

    matmul._cuda_has_blocks.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", version)
    assert matmul._cuda_has_blocks() is expected
    matmul._cuda_has_blocks.cache_clear()
