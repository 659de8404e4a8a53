# SPDX-License-Identifier: Apache-2.0
"""Arms, corpora and options of pretraining studies."""

import itertools
import json
import math
from pathlib import Path

import pytest
import yaml
from tiny_models import make_model

from hf_mxfp4.integrations.transformers.swap import quantize_linears
from recipes.pretraining.arguments import StudyArguments, parse
from recipes.pretraining.arms import (
    BASELINE,
    NAMED_ARMS,
    choose_arms,
    quantized_operands,
)
from recipes.pretraining.corpus import ALPHABET, Language, generate, load_corpus


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
FPROP, DGRAD, WGRAD = {"fprop.x", "fprop.weight"}, {"dgrad.grad", "dgrad.weight"}, {"wgrad.grad", "wgrad.x"}


def arms(*names, extra=None, rule="floor"):
    return {arm.name: arm for arm in choose_arms([BASELINE, *names], extra, rule)}


# ---- arms


@pytest.mark.parametrize(
    "name, expected",
    [("fprop", FPROP), ("fprop_dgrad", FPROP | DGRAD)]
    + [(name, FPROP | DGRAD | WGRAD) for name in NAMED_ARMS if name.startswith("all")],
)
def test_arms_quantize_what_they_say(name, expected):
    model = make_model(layers=2, hidden=32, intermediate=48)
    quantize_linears(model, arms(name)[name].config)
    operands = quantized_operands(model)
    assert {operand for operand, count in operands.items() if count} == expected
    assert {count for count in operands.values() if count} == {14}  # every linear layer of both blocks


def test_rotation_and_rounding_of_the_stabilisers():
    chosen = arms(*(name for name in NAMED_ARMS if name.startswith("all")), rule="even")
    rotations = {name: str(arm.config.gemms().wgrad.rotation) for name, arm in chosen.items() if arm.config}
    assert rotations == {
        "all": "None",
        "all_sr": "None",
        "all_random16": "random-16",
        "all_deterministic16": "deterministic-16",
        "all_deterministic32": "deterministic-32",
    }
    rounding = chosen["all_sr"].config.gemms()
    assert str(rounding.dgrad.left) == str(rounding.wgrad.left) == "mxfp4+even+stochastic"
    assert str(rounding.wgrad.right) == "mxfp4+even" and str(rounding.fprop.right) == "mxfp4+even+32x32"
    assert not chosen["all"].config.gemms().is_random


@pytest.mark.parametrize(
    "names, extra, message",
    [
        (["baseline", "al"], None, "did you mean 'all'"),
        (["all"], None, "must be distinct, with 'baseline'"),
        (["baseline", "all", "all"], None, "must be distinct"),
        (["baseline", "x"], {"x": {"preset": "w4a3"}}, "arm x: "),
        (["baseline", "x"], {"x": {"presett": "w4a4"}}, "did you mean 'preset'"),
        (["baseline"], {"all": {}}, "built-in arm"),
        (["baseline"], ["all"], "must map names"),
    ],
)
def test_bad_arms(names, extra, message):
    with pytest.raises(ValueError, match=message):
        choose_arms(names, extra, "floor")


# ---- the generated language


def test_entropy_is_that_of_the_generator():
    language = Language()
    texts, entropy = generate(language, "validation", 5000)
    characters = sum(len(text) + 1 for text in texts)
    assert characters >= 5000 > characters - len(texts[-1]) - 1
    expected = sum(nats for _, nats in itertools.islice(language.documents("validation"), len(texts))) / characters
    assert entropy == pytest.approx(expected)
    assert 0.5 < entropy < math.log(len(ALPHABET))


# ---- corpora


def options(**changes):
    return StudyArguments(sequence_length=32, validation_sequences=4, **changes)


def test_generated_sequences_have_every_token_once():
    corpus = load_corpus(options(), 32 * 50)
    assert len(corpus.train) == 50 and len(corpus.validation) == 4
    rows = corpus.train["input_ids"]
    assert all(len(row) == 32 for row in rows) and (corpus.train[3]["labels"] == corpus.train[3]["input_ids"]).all()
    expected, _ = generate(Language(), "train", 1000)
    text = "".join(corpus.tokenizer.decode(row) for row in rows)
    assert text.startswith(corpus.tokenizer.eos_token.join(expected[:10]))


def test_order_follows_the_seed_alone():
    corpus = load_corpus(options(), 32 * 50)
    first, other = corpus.ordered(1, 8), corpus.ordered(2, 10)
    again = load_corpus(options(), 32 * 50).ordered(1, 8)
    assert [row.tolist() for row in first["input_ids"]] == [row.tolist() for row in again["input_ids"]]
    assert len(first) == 48 and len(other) == 50  # whole steps
    rows = {tuple(row.tolist()) for row in other["input_ids"]}
    assert len(rows) == 50 and {tuple(row.tolist()) for row in first["input_ids"]} < rows
    with pytest.raises(ValueError, match="50 sequences, less than a step of 51"):
        corpus.ordered(1, 51)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_local_files(tmp_path, kind):
    train, validation = tmp_path / f"train.{kind}", tmp_path / f"validation.{kind}"
    for path, text in ((train, "ab" * 100), (validation, "cd" * 100)):
        path.write_text(text if kind == "txt" else json.dumps({"text": text}) + "\n")
    corpus = load_corpus(options(corpus="files", data_files=[str(train)], validation_files=[str(validation)]), 64)
    assert corpus.tokenizer.decode(corpus.train[0]["input_ids"]) == "ab" * 16
    assert len(corpus.train) == 201 // 32 and corpus.entropy is None  # 200 bytes and the end of the document


def test_files_that_cannot_be_used(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("abc")
    missing = options(corpus="files", data_files=["nowhere.txt"], validation_files=[str(short)])
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        load_corpus(missing, 64)
    with pytest.raises(ValueError, match="validation text has 0 sequences of 32"):
        load_corpus(options(corpus="files", data_files=[str(short)], validation_files=[str(short)]), 64)
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"body": "abc"}\n')
    with pytest.raises(ValueError, match="text_column can be body"):
        load_corpus(options(corpus="files", data_files=[str(lines)], validation_files=[str(lines)]), 64)
    with pytest.raises(ValueError, match="not both"):
        load_corpus(options(corpus="files", data_files=[str(short), str(lines)], validation_files=[str(short)]), 64)


# ---- options


@pytest.mark.parametrize(
    "words, message",
    [
        (["--arm", "all"], "did you mean 'arms'"),
        (["--extra_tokens", "-1"], "extra_tokens=-1.0"),
        (["--target_fraction", "0.5"], "target_fraction is gone: the target is"),
        (["--corpus", "c4"], "must be one of generated, files, hub"),
        (["--corpus", "files"], "needs data_files"),
        (["--data_files", "a.txt"], "needs data_files"),
        (["--seeds", "1", "1"], "distinct"),
        (["--tokenizer_name", "gpt2"], "its own tokenizer"),
        (["--sequence_length", "1"], "sequence_length=1"),
        (["--max_steps", "-1"], "max_steps must be"),
        (["--extra_arms", "{a: ["], "neither YAML nor JSON"),
        (["--arms", "baseline", "fpro"], "did you mean 'fprop'"),
        (["--scale_rule", "up"], "scale_rule='up'"),
    ],
)
def test_bad_options(words, message):
    with pytest.raises(ValueError, match=message):
        parse(words)


def test_every_arm_trains_beyond_the_budget_up_to_an_evaluation():
    study = parse(["--max_steps", "100", "--eval_steps", "30", "--extra_tokens", "0.4"])
    assert study.total_steps == 150 and study.tokens_per_step == 8 * 128 and study.budget_tokens == 102400
    assert parse(["--max_steps", "100", "--eval_steps", "10", "--extra_tokens", "0.4"]).total_steps == 140
    assert parse(["--max_steps", "100", "--eval_steps", "10", "--extra_tokens", "0"]).total_steps == 100
    assert study.precision == "full precision (float32)"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("pretrain_*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_of_studies_parse(path):
    study = parse(["--config", str(path), "--use_cpu=true", "--bf16=false", "--tf32=false"])
    shipped = yaml.safe_load(path.read_text())
    assert [arm.name for arm in study.arms] == shipped["arms"]
    for name, value in shipped.items():
        owner = study.options if hasattr(study.options, name) else study.training
        if name not in ("use_cpu", "bf16", "tf32", "report_to"):
            assert getattr(owner, name) in (value, str(value)), name
