# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of GGUF files reads from llama.cpp and from the files."""

import pytest
import torch
from tiny_models import make_model

from benchmarks.gguf_perplexity import bits_per_weight, figures
from hf_mxfp4.checkpoint import export


PRINTED = """
====== Perplexity statistics ======
Mean PPL(Q)                   :   5.872897 ±   0.128260
Mean PPL(base)                :   4.632956 ±   0.098212
Cor(ln(PPL(Q)), ln(PPL(base))):  94.90%
Mean ln(PPL(Q)/PPL(base))     :   0.237163 ±   0.006893

====== KL divergence statistics ======
Mean    KLD:   0.231540 ±   0.003300
Maximum KLD:   7.712341

====== Token probability statistics ======
Same top p: 79.964 ± 0.379 %
"""


def test_figures():
    assert figures(PRINTED) == {
        "value": 5.872897,
        "baseline": 4.632956,
        "nats_to_bf16": 0.237163,
        "standard_error": 0.006893,
        "divergence": 0.231540,
        "same_top_percent": 79.964,
    }
    with pytest.raises(ValueError, match="no divergence"):
        figures(PRINTED.replace("KLD", "it"))


def test_bits_of_the_layers(tmp_path):
    make_model("llama", hidden=64, intermediate=96, layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "all", "gguf")
    assert bits_per_weight(tmp_path / "all" / "model-MXFP4.gguf") == 4.25
    export(tmp_path / "model", tmp_path / "some", "gguf", modules_to_not_convert=["mlp"])
    mlp, attention = 3 * 64 * 96, 3 * 64 * 64
    expected = (16 * mlp + 4.25 * attention) / (mlp + attention)
    assert bits_per_weight(tmp_path / "some" / "model-MXFP4.gguf") == expected
