# SPDX-License-Identifier: Apache-2.0
"""Evaluations: scores of texts, schemes put on a model, figures, standard errors, files, and the log to resume from."""

import csv
import json
import math

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from hf_mxfp4 import MXFP4RLConfig, lab
from hf_mxfp4.lab import evaluate, read_schemes, reference_of, score, swapped
from hf_mxfp4.lab.evaluation import scoring
from hf_mxfp4.lab.reports import evaluation_columns, evaluation_table


TEXTS = [torch.randint(0, 32, (1, n), generator=torch.Generator().manual_seed(n)) for n in (9, 40, 2)]
FALLBACK = {"scale_rule": "even", "macro_search": "block_mantissas", "outlier_fallback": 1.0}


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
        assert found == lab.Score(n, pytest.approx(loss * n, rel=2e-6), 0.0, n)
    assert score(model, reference, TEXTS) == list(reference.scores.values())
    assert [(s.kl, s.same_top) for s in score(model, None, TEXTS)] == [(None, None)] * 3


@pytest.mark.parametrize("kept", [0, 2**30])
def test_divergence_of_two_models_is_that_of_torch(monkeypatch, kept):
    monkeypatch.setattr(scoring, "_ROWS", 16)
    monkeypatch.setattr(scoring, "_KEPT_BYTES", kept)  # the reference's logits are computed again, or kept
    first = make_model("llama")
    second = make_model("llama", seed=1)
    for head in (first.lm_head, second.lm_head):  # predictions that differ
        head.weight.data *= 20
    found = score(second, reference_of(first, TEXTS), TEXTS)
    for ids, own in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            p, q = (torch.distributions.Categorical(logits=m(ids).logits[0, :-1].double()) for m in (first, second))
        assert own.kl == pytest.approx(torch.distributions.kl_divergence(p, q).sum().item(), rel=1e-5)
        assert own.nll == pytest.approx(-q.log_prob(ids[0, 1:]).sum().item(), rel=1e-5)
        assert own.same_top == int((p.logits.argmax(-1) == q.logits.argmax(-1)).sum())
    assert sum(own.kl for own in found) > 10
    assert sum(own.same_top for own in found) < 49


def test_a_token_that_the_reference_excludes_adds_nothing():
    reference = torch.tensor([[0.5, 0.5, 0.0]]).log()
    own = torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert scoring._divergence(reference, own) == pytest.approx(math.log(2))
    assert scoring._divergence(reference, reference) == 0.0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, {"preset": "w4a16"}, FALLBACK, {"preset": "paper_b"}], ids=str)
def test_a_swapped_model_has_the_bits_of_one_that_was_loaded_so(checkpoint, options, family):
    folder = checkpoint(family, dtype=torch.bfloat16)
    config = MXFP4RLConfig(**options, smooth=False, dither_ties=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=config)
    with torch.no_grad():
        before = plain(TEXTS[1]).logits
        with swapped(plain, config) as sqnr_db:
            logits = [plain(ids).logits for ids in TEXTS]
        after = plain(TEXTS[1]).logits
        assert all(torch.equal(found, loaded(ids).logits) for found, ids in zip(logits, TEXTS, strict=True))
    assert sqnr_db == loaded.quantization_report.sqnr_db
    assert not torch.equal(logits[1], before)
    assert torch.equal(after, before)


def test_a_policy_is_its_own_reference_on_its_master_weights(checkpoint):
    folder = checkpoint("llama", dtype=torch.bfloat16)
    config = MXFP4RLConfig(smooth=False, dither_ties=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=config)
    reference = reference_of(plain, TEXTS)
    with swapped(plain, config):
        scores = score(plain, reference, TEXTS)
    assert scores == score(loaded, reference_of(loaded, TEXTS), TEXTS)
    assert scores[1].kl > 1e-4


def state(model):
    """The modules of a model, and the names of its attributes."""
    return dict(model.named_modules()), set(model.__dict__)


def test_an_exception_leaves_a_model_as_it_was():
    model = make_model("qwen3_moe")
    before = state(model)
    with pytest.raises(KeyError), swapped(model, MXFP4RLConfig()):
        assert state(model) != before
        raise KeyError
    assert state(model) == before


def test_a_scheme_that_does_not_fit_leaves_a_model_as_it_was():
    model = make_model("qwen3_moe")
    before = state(model)
    nothing = MXFP4RLConfig(modules_to_not_convert=["model"])
    with pytest.raises(ValueError, match="matches no layer"), swapped(model, nothing):
        pass
    assert state(model) == before


def test_a_reference_keeps_the_mode_of_training():
    model = make_model("llama").train()
    reference_of(model, TEXTS)
    assert all(module.training for module in model.modules())


def test_a_quantized_model_gets_no_second_scheme():
    model = make_model("llama")
    with swapped(model, MXFP4RLConfig()), pytest.raises(ValueError, match="is quantized; schemes are put on"):
        with swapped(model, MXFP4RLConfig()):
            pass


def test_what_cannot_be_measured_says_why(checkpoint):
    model = make_model("llama")
    for ids in (torch.zeros(1, 1, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long), torch.zeros(4)):
        with pytest.raises(ValueError, match=r"text 0 is \[.*\], not \[1, tokens\] with two tokens or more"):
            reference_of(model, [ids])
    options = {"quantization_config": MXFP4RLConfig(mode="packed"), "dtype": torch.bfloat16}
    packed = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), **options)
    with pytest.raises(ValueError, match="exist in 4 bits only"):
        reference_of(packed, TEXTS)
    assert [found.tokens for found in score(packed, None, TEXTS)] == [8, 39, 1]
    model.lm_head.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="the logits of text 1 have NaN"):
        score(model, None, TEXTS, only=[1])


SHORT_TEXTS = [torch.randint(0, 32, (1, n), generator=torch.Generator().manual_seed(n)) for n in (9, 30, 5)]
NAMES = ["rceil", "w4a16:even", "even+mbs128-blockwise+of1"]


def row(name, nlls, kls=None, same=None):
    counts = (2, 2)
    scheme = None if kls is None else read_schemes([name])[0]
    kls = kls or (0.0, 0.0)
    same = same or counts
    scores = tuple(lab.Score(*values) for values in zip(counts, nlls, kls, same, strict=True))
    return lab.Row(name, scores, scheme, None if scheme is None else 18.5)


def example():
    rows = (
        row("full precision", (2.0, 4.0)),
        row("rceil", (3.0, 5.5), (1.0, 1.0), (1, 1)),
        row("w4a16:even", (2.5, 4.5), (0.25, 0.75), (2, 1)),
        row("even+mbs128-blockwise+of1", (2.5, 4.0), (0.5, 0.25), (2, 2)),
        row("rceil+of0.5", (2.25, 4.25), (0.25, 0.125), (2, 2)),
    )
    return lab.Evaluation("tiny", "test.jsonl", rows, "full precision", {"dtype": "float32", "device": "cpu"})


def test_differences_are_paired_by_text():
    full, rceil, *_ = example().rows
    assert full.perplexity == pytest.approx(math.exp(1.5))
    assert rceil.perplexity == pytest.approx(math.exp(8.5 / 4))
    # 1 and 1.5 nats of 2 tokens each: paired, the texts' own difficulty does not count.
    difference = rceil.difference(full)
    assert difference.value == 0.625
    assert difference.error == pytest.approx(math.sqrt(2 * 2 * 0.25**2) / 4)


def test_divergence_from_the_reference():
    rceil = example().rows[1]
    assert (rceil.kl.value, rceil.kl.error) == (0.5, 0.0)
    assert rceil.same_top == 0.5


def test_the_best_scheme_and_the_front():
    found = example()
    assert found.best.name == "even+mbs128-blockwise+of1"
    # Weights alone are another kind than both operands. Of the two with residuals, rceil+of0.5 has fewer bits.
    assert {kind: [row.name for row in rows] for kind, rows in found.fronts.items()} == {
        "weights and activations": ["rceil", "rceil+of0.5"],
        "weights": ["w4a16:even"],
    }


def test_an_evaluation_as_data():
    data = example().to_dict()
    assert [(row["name"], row.get("bits"), row.get("on_front")) for row in data["rows"]] == [
        ("full precision", None, None),
        ("rceil", 4.25, True),
        ("w4a16:even", 4.25, True),
        ("even+mbs128-blockwise+of1", 8.5625, False),
        ("rceil+of0.5", 8.5, True),
    ]
    assert data["differences"]["w4a16:even"]["rceil"]["value"] == -0.375


def test_the_table_of_an_evaluation():
    found = example()
    assert dict(zip(evaluation_columns(found), evaluation_table(found)[1], strict=True)) == {
        "scheme": "rceil *",
        "bits": "4.25",
        "perplexity": "8.373",
        "difference, nats": "+0.625 ± 0.125",
        "KL, nats": "0.5000 ± 0.0000",
        "same top token %": "50.0",
        "to the best, nats": "+0.500 ± 0.250",
        "weight SQNR dB": "18.50",
    }


def test_the_files_of_an_evaluation(tmp_path):
    data, scores, page = lab.write_evaluation(example(), tmp_path)
    assert json.loads(data.read_text())["rows"][1]["kl"] == {"value": 0.5, "standard_error": 0.0}
    lines = list(csv.reader(scores.open()))
    assert lines[3] == ["rceil", "0", "2", "3.0", "1.0", "1"]
    assert len(lines) == 1 + 5 * 2
    for text in ("Perplexity of tiny", "2 texts, 4 predicted tokens of test.jsonl", "w4a16:even *", "data:image/png"):
        assert text in page.read_text()


def test_the_fronts_are_drawn():
    figure = lab.front_figure(example())
    fronts = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert fronts["front of weights and activations"] == [[4.25, 0.5], [8.5, 0.09375]]
    assert fronts["front of weights"] == [[4.25, 0.25]]


def test_a_model_without_schemes_and_reference():
    alone = lab.Evaluation("tiny", "test.jsonl", (example().rows[0],), None, {})
    assert evaluation_columns(alone) == ["scheme", "perplexity"]
    assert evaluation_table(alone) == [["full precision", "4.482"]]
    with pytest.raises(ValueError, match="nothing to plot"):
        lab.front_figure(alone)


def log_of(path):
    return lab.ScoreLog(path, {"model": "tiny"})


def test_an_interrupted_run_goes_on_to_the_same_figures(tmp_path):
    model = make_model("llama")
    schemes = read_schemes(NAMES)
    told = []
    whole = evaluate(model, SHORT_TEXTS, schemes)
    assert [each.name for each in whole] == ["full precision", *NAMES]

    class Stop(Exception):
        pass

    def stop(count, name):
        told.append((count, name))
        if len(told) == 8:
            raise Stop

    with log_of(tmp_path / "progress.jsonl") as log, pytest.raises(Stop):
        evaluate(model, SHORT_TEXTS, schemes, log=log, on_tokens=stop)
    assert told[3:] == [(8, "rceil"), (29, "rceil"), (4, "rceil"), (8, "w4a16:even"), (29, "w4a16:even")]
    with open(tmp_path / "progress.jsonl", "ab") as file:
        file.write(b'{"scheme": "torn')
    told.clear()
    with log_of(tmp_path / "progress.jsonl") as log:
        assert evaluate(model, SHORT_TEXTS, schemes, log=log, on_tokens=lambda *told_of: told.append(told_of)) == whole
    assert sum(count for count, _ in told) == 4 * 41  # what was known counts as done
    before = (tmp_path / "progress.jsonl").read_bytes()
    with log_of(tmp_path / "progress.jsonl") as log:
        assert evaluate(model, SHORT_TEXTS, schemes[1:], log=log) == (whole[0], *whole[2:])
    assert (tmp_path / "progress.jsonl").read_bytes() == before


def test_another_model_as_the_reference():
    model = make_model("llama")
    other = make_model("llama", seed=1)
    schemes = read_schemes(["rceil"])
    reference, full, scheme = evaluate(model, SHORT_TEXTS, schemes, reference=other, reference_name="other")
    assert (reference.name, full.name, scheme.name) == ("other", "full precision", "rceil")
    assert reference.kl.value == 0.0 < full.kl.value
    plain = evaluate(model, SHORT_TEXTS)[0]
    assert [score.nll for score in full.scores] == [score.nll for score in plain.scores]


def test_weights_that_are_stored_quantized_have_no_reference():
    model = make_model("llama")
    (stored,) = evaluate(model, SHORT_TEXTS, stored=True)
    assert stored.name == "as stored"
    assert stored.kl is None
    assert stored.same_top is None
    assert stored.perplexity == evaluate(model, SHORT_TEXTS)[0].perplexity
    with pytest.raises(ValueError, match="stored quantized, so no other scheme"):
        evaluate(model, SHORT_TEXTS, read_schemes(["rceil"]), stored=True)
