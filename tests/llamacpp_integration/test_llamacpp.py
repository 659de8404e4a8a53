# SPDX-License-Identifier: Apache-2.0
"""Exported files in llama.cpp: it computes what transformers does with the same values, but for its own rounding."""

import os
from pathlib import Path

import pytest
import torch
from llamacpp_harness import compute, distance, eight_bit_inputs, in_float32, tokenize
from tiny_models import SPLITS, TEXT, make_fallback_tokenizer, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import export


pytestmark = pytest.mark.llamacpp

FILE = "model-MXFP4.gguf"
TOKENS = torch.randint(2, 32, (40,), generator=torch.Generator().manual_seed(0)).tolist()
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"rope_type": "llama3", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
SHORT_YARN = YARN | {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": ("llama", {"tie": True}),
    "llama, frequencies of Llama 3, biases": (
        "llama",
        {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, three heads to a key": (
        "llama",
        {"hidden": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen2, yarn": ("qwen2", {"rope_parameters": SHORT_YARN, "max_position_embeddings": 256}),
    "qwen3, linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "mixtral": ("mixtral", {}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "sliding_window": 16}),
    "gpt_oss, yarn": (
        "gpt_oss",
        {"rope_parameters": {**YARN, "truncate": True}, "head_dim": 64, "max_position_embeddings": 131072},
    ),
}


def save(folder: Path, family: str, **options) -> Path:
    """A checkpoint with weights large enough for its layers to matter."""
    model = make_model(family, dtype=torch.bfloat16, **options)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def exported_values(folder: Path, work: Path):
    """A plain float32 model with the values of an exported checkpoint."""
    export(folder, work / "bf16", "bf16")
    return AutoModelForCausalLM.from_pretrained(work / "bf16", dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_ours_but_for_its_eight_bit_inputs(name, run_tokens, tmp_path):
    family, options = MODELS[name]
    export(save(tmp_path / "model", family, **options), tmp_path / "out", "gguf")
    model = exported_values(tmp_path / "model", tmp_path)
    ours = model(torch.tensor([TOKENS])).logits[0]
    exact, _ = compute(run_tokens, in_float32(tmp_path / "out" / FILE, tmp_path / "exact.gguf"), TOKENS)
    assert distance(exact, ours) < 1e-5
    rounded, _ = compute(run_tokens, tmp_path / "out" / FILE, TOKENS)
    assert 1e-3 < distance(rounded, ours) < 0.2
    if family in ("llama", "qwen2", "qwen3"):
        with eight_bit_inputs(model):
            simulated = model(torch.tensor([TOKENS])).logits[0]
        # Not nothing: sums in another order put some inputs on the other side of a rounding boundary.
        assert distance(rounded, simulated) < 0.5 * distance(rounded, ours)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def policy(request, tmp_path_factory):
    """A model that was trained in MXFP4 to count by sevens."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, norm_topk_prob=True).save_pretrained(folder / "start")
    config = MXFP4RLConfig(mode="qat", preset="w4a16", scale_rule="even", macro_block=None, outlier_fallback=None)
    model = AutoModelForCausalLM.from_pretrained(folder / "start", quantization_config=config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    starts = torch.arange(2, 32)
    counted = (starts[:, None] - 2 + 7 * torch.arange(24)) % 30 + 2
    for _ in range(120):
        model(counted, labels=counted).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder / "policy")
    return model, folder / "policy"


def test_greedy_tokens_of_a_trained_policy(policy, run_tokens, tmp_path):
    model, folder = policy
    report = export(folder, tmp_path / "out", "gguf")
    assert set(report.counts()) == {"packed"}
    for start in (2, 9, 30):
        prompt = [start, (start - 2 + 7) % 30 + 2]
        ours = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        _, theirs = compute(run_tokens, tmp_path / "out" / FILE, prompt, new=16)
        expected = [(start - 2 + 7 * i) % 30 + 2 for i in range(2, 18)]
        assert theirs == ours[0, 2:].tolist() == expected


@pytest.mark.parametrize("split", [*SPLITS, "bytes as a fallback"])
@pytest.mark.parametrize("begins", [False, True])
def test_text_becomes_the_same_tokens(split, begins, run_tokens, tmp_path):
    tokenizer = make_tokenizer(split, begins=begins) if split in SPLITS else make_fallback_tokenizer()
    save(tmp_path / "model", "llama", vocab_size=512)
    tokenizer.save_pretrained(tmp_path / "model")
    report = export(tmp_path / "model", tmp_path / "out", "gguf")
    assert not report.notes
    for text in [*TEXT, "<|im_start|>user\nWhat's 12345 + 6?<|im_end|>\n", "Tab\there   and 3rd; ÄÖ don't"]:
        assert tokenize(run_tokens, tmp_path / "out" / FILE, text) == tokenizer(text).input_ids


@pytest.mark.skipif("LLAMACPP_MODEL" not in os.environ, reason="LLAMACPP_MODEL names no folder of a Llama or a Qwen")
@torch.no_grad()
def test_a_real_model(run_tokens, tmp_path):
    folder = Path(os.environ["LLAMACPP_MODEL"])
    export(folder, tmp_path / "out", "gguf")
    text = "Question: Natalia sold 48 clips in April, and half as many in May. How many in all?\nAnswer:"
    tokens = tokenize(run_tokens, tmp_path / "out" / FILE, text)
    assert tokens == AutoTokenizer.from_pretrained(folder)(text).input_ids
    model = exported_values(folder, tmp_path)
    ours = model(torch.tensor([tokens])).logits[0]
    exact, theirs = compute(run_tokens, in_float32(tmp_path / "out" / FILE, tmp_path / "exact.gguf"), tokens, new=32)
    assert distance(exact, ours) < 1e-4
    greedy = model.generate(torch.tensor([tokens]), max_new_tokens=32, do_sample=False, eos_token_id=None)
    assert theirs == greedy[0, len(tokens) :].tolist()
    rounded, _ = compute(run_tokens, tmp_path / "out" / FILE, tokens)
    with eight_bit_inputs(model):
        simulated = model(torch.tensor([tokens])).logits[0]
    assert distance(rounded, simulated) < distance(rounded, ours) < 0.2
