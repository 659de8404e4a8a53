# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 eval` as a user meets it: tables, files, messages, exit codes, resumption, and figures in model cards."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from commands import ALPHABET, change_in_place, finish, run, save_texts, save_tokenizer
from safetensors.torch import load_file, save_file
from same_bits import edit_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import add_evaluation, is_generated
from hf_mxfp4.lab import read_schemes, without_each
from hf_mxfp4.lab.reports import add_perplexity


ROWS = [{"question": f"{i}+{i}?", "answer": f"{i}+{i}={2 * i}"} for i in (1, 22, 304)]
FILES = ("evaluation.json", "texts.csv", "evaluation.html")

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture
def text(tmp_path):
    return save_texts(tmp_path / "sums.jsonl", ROWS)


@pytest.fixture
def folder(checkpoint):
    return save_tokenizer(Path(checkpoint("llama")))


@pytest.fixture
def policy(folder, tmp_path):
    """What training saves: master weights and a scheme."""
    config = MXFP4RLConfig(scale_rule="even", outlier_fallback=None)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    model.save_pretrained(tmp_path / "policy")
    return save_tokenizer(tmp_path / "policy")


def losses(model):
    """Nats per token of transformers' own loop."""
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    ids = [tokenizer(f"{row['question']}\n{row['answer']}", return_tensors="pt").input_ids for row in ROWS]
    with torch.no_grad():
        sums = [model(each, labels=each).loss.item() * (each.shape[1] - 1) for each in ids]
    return sum(sums) / sum(each.shape[1] - 1 for each in ids)


def test_a_checkpoint_from_start_to_end(folder, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--device", "cpu", "--text", text, "--scheme", "w4a16:rceil", "--scheme", "even+mbs128-blockwise")
    done = finish("eval", folder, *words)
    out = tmp_path / "evaluation" / "--".join(folder.parts[-2:])
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "progress.jsonl"])
    report = json.loads((out / "evaluation.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["full precision", "w4a16:rceil", "even+mbs128-blockwise"]
    assert (report["texts"], report["tokens"], report["text"]) == (3, 9 + 14 + 19, "sums.jsonl")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    config = MXFP4RLConfig(preset="w4a16", scale_rule="rceil", macro_block=None)
    quantized = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    expected = [losses(plain), losses(quantized)]
    assert [row["nats"]["value"] for row in report["rows"][:2]] == pytest.approx(expected, rel=1e-6)
    assert report["rows"][1]["difference"]["value"] == pytest.approx(expected[1] - expected[0], abs=1e-6)
    assert report["rows"][1]["weight_sqnr_db"] == pytest.approx(quantized.quantization_report.sqnr_db)
    for words in (
        "3 texts, 42 predicted tokens of sums.jsonl (float32, cpu)",
        "4.31",
        "KL, nats",
        f"{math.exp(expected[0]):.3f}",
    ):
        assert words in done.stdout
    page = (out / "evaluation.html").read_text()
    assert "w4a4 [weights mxfp4+even+mbs128-blockwise" in page
    assert 'src="http' not in page


def test_results_of_two_models_do_not_mix(folder, text, tmp_path):
    words = ("eval", folder, "--text", text, "--scheme", "w4a16:rceil", "--out", tmp_path / "out")
    finish(*words)
    for change in (
        lambda: change_in_place(folder / "model.safetensors"),
        lambda: edit_config(folder, rms_norm_eps=0.5),
    ):
        change()
        assert "other files of the model" in finish(*words, code=2).stderr
        finish(*words, "--overwrite")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    finish(*words)


def test_a_model_that_lacks_a_tensor_is_not_measured(folder, text, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    done = finish("eval", folder, "--out", tmp_path / "out", "--text", text, code=2)
    assert "has model.norm.weight (1 tensors are missing)" in done.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_read_are_named(folder, text, tmp_path):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "pipe"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(folder / "pipe")
    done = finish("smooth", folder, tmp_path / "out", "--text", text, code=2)
    assert "pipe is not a file" in done.stderr


def test_each_layer_in_full_precision_in_turn(folder, text, tmp_path):
    scheme = ("--scheme", "w4a16:floor", "--without-each", "layer")
    done = finish("eval", folder, "--text", text, "--json", "--out", tmp_path / "out", *scheme)
    _, whole, *parts = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in parts] == [f"w4a16:floor without model.layers.{i}" for i in (0, 1)]
    # The layers are alike: half of the weights in 16 bits, the others in 4.25.
    assert [row["bits"] for row in (whole, *parts)] == [4.25, 10.125, 10.125]
    config = MXFP4RLConfig(preset="w4a16", scale_rule="floor", modules_to_not_convert=["layers.1"], macro_block=None)
    quantized = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert parts[1]["nats"]["value"] == pytest.approx(losses(quantized), rel=1e-6)


def test_each_type_of_layer_in_full_precision_in_turn(folder):
    (scheme,) = read_schemes(["w4a16:floor"])
    parts = without_each(scheme, AutoModelForCausalLM.from_pretrained(folder), "type")
    assert [part.name for part in parts[:3]] == [f"w4a16:floor without self_attn.{x}_proj" for x in "qkv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "rciel"], "did you mean 'rceil'"),
        (["--text", "gone.jsonl"], "gone.jsonl cannot be read"),
        (["--text-field", "body"], "has no text in 'body' (it has question, answer)"),
        (["--max-length", "1"], "--max-length"),
        (["--card"], "README.md does not exist; save_pretrained of a quantized model writes it"),
        (["--reference", "gone"], "gone cannot be loaded to run it"),
        (["--scheme", "config:skips.yaml"], "modules_to_not_convert has 'layers.9', which matches no module"),
    ],
)
def test_wrong_usage(folder, text, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("skips.yaml").write_text("modules_to_not_convert: [layers.9]\n")
    done = run("eval", folder, "--text", text, "--out", tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_a_policy_is_measured_on_its_master_weights_and_under_its_own_scheme(policy, text, tmp_path):
    equal = ("--scheme", f"config:{policy / 'config.json'}", "--scheme", "own")  # which are measured once
    done = finish("eval", policy, "--text", text, "--out", tmp_path / "out", "--card", "--json", *equal)
    full, own = json.loads(done.stdout)["rows"]
    assert (full["name"], own["name"]) == ("full precision", "own")
    assert own["kl"]["value"] > 0
    quantized = AutoModelForCausalLM.from_pretrained(policy)
    assert own["nats"]["value"] == pytest.approx(losses(quantized), rel=1e-6)
    card = (policy / "README.md").read_text()
    for words in (
        "On 3 texts of `sums.jsonl`, 42 predicted tokens, in float32",
        f"| perplexity | {own['perplexity']:.3f} |",
        f"| perplexity of full precision (the master weights) | {full['perplexity']:.3f} |",
        f"| KL to it, nats per token | {own['kl']['value']:.4f} ± {own['kl']['standard_error']:.4f} |",
    ):
        assert words in card
    assert card.index("Quantization error of the weights") < card.index("## Perplexity") < card.index("## Evaluation")
    add_perplexity(policy, json.loads((tmp_path / "out" / "evaluation.json").read_text()))
    assert (policy / "README.md").read_text() == card  # in the same place


@pytest.fixture
def evaluation():
    """What `hf-mxfp4 eval` writes of a checkpoint without a reference."""
    row = {"name": "own", "perplexity": 2.0}
    return {"rows": [row], "reference": None, "texts": 1, "text": "sums.jsonl", "tokens": 4, "dtype": "float32"}


def test_accuracies_and_perplexity_have_a_place_each(policy, evaluation):
    accuracy = {"exact": 0.5}
    facts = {"task": "sums", "steps": 1, "seed": 0, "n_test": 4, "scheme": ""}
    add_perplexity(policy, evaluation)
    add_evaluation(policy, {**facts, "accuracy_before": accuracy, "accuracy_after": accuracy})
    card = (policy / "README.md").read_text()
    assert is_generated(card)
    assert card.count("## Perplexity") == 1
    assert "| exact | 0.500" in card


def test_cards_that_get_no_perplexity(policy, evaluation):
    other = {**evaluation, "rows": [{"name": "rceil"}]}
    with pytest.raises(ValueError, match="none of which is the checkpoint's own scheme"):
        add_perplexity(policy, other)
    card = policy / "README.md"
    card.write_text(card.read_text().replace("## Scheme", "Mine.\n\n## Scheme"))
    with pytest.raises(ValueError, match="written or edited by somebody"):
        add_perplexity(policy, evaluation)


@pytest.fixture
def packed(folder, tmp_path):
    finish("pack", folder, tmp_path / "packed")
    return save_tokenizer(tmp_path / "packed")


def test_weights_that_are_stored_in_four_bits(folder, packed, text, tmp_path):
    done = finish("eval", packed, "--text", text, "--out", tmp_path / "out", "--json")
    (alone,) = json.loads(done.stdout)["rows"]
    assert alone["name"] == "as stored"
    assert "kl" not in alone
    against = ("--reference", folder, "--card")
    done = finish("eval", packed, "--text", text, "--out", tmp_path / "other", "--json", *against)
    original, stored = json.loads(done.stdout)["rows"]
    assert original["name"] == folder.name
    assert stored["kl"]["value"] > 0
    assert stored["nats"] == alone["nats"]
    assert f"| perplexity of `{folder.name}` | {original['perplexity']:.3f} |" in (packed / "README.md").read_text()


def test_no_other_scheme_is_put_on_stored_weights(packed, text, tmp_path):
    refused = finish("eval", packed, "--text", text, "--scheme", "rceil", "--out", tmp_path / "out", code=2)
    assert "stores quantized weights, so no other scheme can be put on it" in refused.stderr


def test_a_reference_of_other_tokens(folder, packed, text, tmp_path):
    save_tokenizer(folder, ALPHABET[::-1])
    refused = finish("eval", packed, "--text", text, "--reference", folder, "--out", tmp_path / "out", code=2)
    assert "another vocabulary" in refused.stderr
