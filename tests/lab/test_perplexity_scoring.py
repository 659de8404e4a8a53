# SPDX-License-Identifier: Apache-2.0
"""Scores of texts against transformers' own loss and torch's own divergence, and schemes that are put on a model and
taken off again."""

import math

import pytest
import torch
from factors import factors_config
from tiny_models import make_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)

from hf_mxfp4.lab import Score, reference_of, score, scoring, swapped


TEXTS = [torch.randint(0, 32, (1, n), generator=torch.Generator().manual_seed(n)) for n in (9, 40, 2)]
SELECTIVE = {"scale_rule": "even", "macro_search": "blockwise", "outlier_fallback": 1.0, "outlier_fallback_rate": 0.1}


def soft_capped():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    caps = {"final_logit_softcapping": 0.05, "attn_implementation": "eager", "pad_token_id": 0}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=32, num_key_value_heads=1, head_dim=16, **sizes, **caps)).eval()


MODELS = {
    "llama": lambda: make_model("llama"),
    "bfloat16": lambda: make_model("qwen2", tie=True, dtype=torch.bfloat16),
    "experts": lambda: make_model("gpt_oss"),
    "router logits": lambda: make_model("qwen3_moe", output_router_logits=True),
    "soft-capped": soft_capped,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_likelihoods_are_those_of_transformers(model):
    model = model()
    reference = reference_of(model, TEXTS)
    with torch.no_grad():
        options = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
        losses = [model(ids, labels=ids, **options).loss.item() for ids in TEXTS]
    for ids, loss, found in zip(TEXTS, losses, reference.scores.values(), strict=True):
        n = ids.shape[1] - 1
        assert found == Score(n, pytest.approx(loss * n, rel=2e-6), 0.0, n)
    assert score(model, reference, TEXTS) == list(reference.scores.values())
    assert [(s.kl, s.same_top) for s in score(model, None, TEXTS)] == [(None, None)] * 3


@pytest.mark.parametrize("kept", [0, 2**30])
def test_divergence_of_two_models_is_that_of_torch(monkeypatch, kept):
    monkeypatch.setattr(scoring, "_ROWS", 16)
    monkeypatch.setattr(scoring, "_KEPT_BYTES", kept)  # the reference's logits are computed again, or kept
    first, second = make_model("llama"), make_model("llama", seed=1)
    for head in (first.lm_head, second.lm_head):  # predictions that differ
        head.weight.data *= 20
    found = score(second, reference_of(first, TEXTS), TEXTS)
    for ids, own in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            p, q = (torch.distributions.Categorical(logits=m(ids).logits[0, :-1].double()) for m in (first, second))
        assert own.kl == pytest.approx(torch.distributions.kl_divergence(p, q).sum().item(), rel=1e-5)
        assert own.nll == pytest.approx(-q.log_prob(ids[0, 1:]).sum().item(), rel=1e-5)
        assert own.same_top == int((p.logits.argmax(-1) == q.logits.argmax(-1)).sum())
    assert sum(own.kl for own in found) > 10 and sum(own.same_top for own in found) < 49


def test_a_token_that_the_reference_excludes_adds_nothing():
    reference = torch.tensor([[0.5, 0.5, 0.0]]).log()
    own = torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert scoring._divergence(reference, own) == pytest.approx(math.log(2))
    assert scoring._divergence(reference, reference) == 0.0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, {"preset": "w4a16"}, SELECTIVE, {"preset": "paper_b"}], ids=str)
def test_a_swapped_model_has_the_bits_of_one_that_was_loaded_so(checkpoint, options, family):
    folder, config = checkpoint(family, dtype=torch.bfloat16), factors_config(**options)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=config)
    reference = reference_of(plain, TEXTS)
    with torch.no_grad():
        before, expected = plain(TEXTS[1]).logits, [loaded(ids).logits for ids in TEXTS]
        with swapped(plain, config) as sqnr_db:
            logits = [plain(ids).logits for ids in TEXTS]
        with swapped(plain, config):
            found = score(plain, reference, TEXTS)
        after = plain(TEXTS[1]).logits
    assert all(map(torch.equal, logits, expected)) and sqnr_db == loaded.quantization_report.sqnr_db
    assert not torch.equal(logits[1], before) and torch.equal(after, before)
    # A policy that is loaded quantized is its own reference, on its master weights.
    assert found == score(loaded, reference_of(loaded, TEXTS), TEXTS)
    assert found[1].kl > 1e-4


def test_a_model_is_left_as_it_was():
    model = make_model("qwen3_moe").train()
    modules, attributes = dict(model.named_modules()), set(model.__dict__)
    with pytest.raises(KeyError), swapped(model, factors_config()):
        assert dict(model.named_modules()) != modules
        raise KeyError
    assert dict(model.named_modules()) == modules and set(model.__dict__) == attributes
    reference_of(model, TEXTS)
    assert all(module.training for module in model.modules())
    with swapped(model, factors_config()), pytest.raises(ValueError, match="is quantized; schemes are put on"):
        with swapped(model, factors_config()):
            pass


def test_what_cannot_be_measured_says_why(checkpoint):
    model = make_model("llama")
    for ids in (torch.zeros(1, 1, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long), torch.zeros(4)):
        with pytest.raises(ValueError, match=r"text 0 is \[.*\], not \[1, tokens\] with two tokens or more"):
            reference_of(model, [ids])
    packed = AutoModelForCausalLM.from_pretrained(
        checkpoint("llama"), quantization_config=factors_config(mode="packed"), dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match="exist in 4 bits only"):
        reference_of(packed, TEXTS)
    assert [found.tokens for found in score(packed, None, TEXTS)] == [8, 39, 1]
    model.lm_head.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="the logits of text 1 have NaN"):
        score(model, None, TEXTS, only=[1])
