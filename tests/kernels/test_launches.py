# SPDX-License-Identifier: Apache-2.0
"""How many kernels layers launch, in training and for a token, on GPUs that need not be there."""

import pytest
from compile_targets import first_target


#: Kernels of ours and of torch in both passes of a trained linear layer, at most. An input is made ready for both of
#: its products at once, or together with the values that are saved of it.
TRAINED = {
    "w4a4": 6,
    "w4a4, default": 6,
    "w4a4g8": 8,
    "w4a4g8, macro 128": 8,
    "w4a4g8, default": 8,
    "w4a4g4": 8,
    "w4a4g4, macro 128": 8,
    "w4a4g4, default": 8,
    # One more each way to keep an input in FP8, and on FP8 tensor cores another read of it.
    "w4a4, saved fp8": 9,
    "w4a4, default, saved fp8": 8,
}
#: The same of a projection of experts. Rows of `w4a4g4` are padded by operators of torch.
EXPERTS = {"w4a4g8": 9, "w4a4g8, macro 128": 9, "w4a4g8, default": 9, "w4a4g4": 30}
#: In a call of a layer on packed weights, for one token.
DECODED = {"decode, packed w4a16": 1, "decode, packed w4a4": 2, "decode, packed + LoRA": 3}
#: More than in bfloat16, for one token through a decoder layer of seven linear layers. Inputs of q, k and v are
#: quantized once, as are those of gate and up.
TOKEN = {"token, packed w4a16": 0, "token, packed w4a4": 4, "token, QAT w4a4": 4, "token, packed + LoRA": 14}


@pytest.mark.parametrize("gpu", first_target("H100", "B200", "RTX 5090"))
def test_launches(run_script, gpu):
    found = run_script("run_launches.py", gpu, interpret=False)
    for name, most in TRAINED.items():
        launched = found[name]["forward"] + found[name]["backward"]
        assert 5 <= len(launched) <= most, (name, launched)
    for name, most in EXPERTS.items():
        launched = found[f"experts, {name}"]["forward"] + found[f"experts, {name}"]["backward"]
        assert 7 <= len(launched) <= most, (name, launched)
    for name, count in DECODED.items():
        assert len(found[name]) == count, (name, found[name])
    # The adapter's two products and their sum, both ways; the frozen weight has no gradient.
    assert len(found["training, packed + LoRA"]) <= 14
    plain = len(found["token, bf16"])
    assert plain > 30
    for name, more in TOKEN.items():
        assert len(found[name]) - plain == more, (name, found[name])


def test_an_h100_multiplies_by_torch(run_script):
    found = run_script("run_launches.py", "H100", interpret=False)
    for name, (forward, backward) in {"w4a4": (1, 0), "w4a4g4": (1, 2), "w4a4g8": (1, 2)}.items():
        counts = [found[name][part].count("_scaled_mm_v2") for part in ("forward", "backward")]
        assert counts == [forward, backward], (name, found[name])
