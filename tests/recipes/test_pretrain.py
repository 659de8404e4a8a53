# SPDX-License-Identifier: Apache-2.0
"""Pretraining studies: the recipe as a whole, arms, corpora, options, and statistics of curves written by hand."""

import itertools
import json
import math
from unittest.mock import Mock

import pytest
import transformers
from datasets import Dataset
from tiny_models import make_model

from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.recipes import pretrain
from hf_mxfp4.recipes.pretrain import main
from hf_mxfp4.recipes.pretraining import corpus as corpora
from hf_mxfp4.recipes.pretraining.arguments import NAMED_ARMS, StudyArguments, choose_arms, parse, quantized_operands
from hf_mxfp4.recipes.pretraining.corpus import ALPHABET, Language, generate, load_corpus
from hf_mxfp4.recipes.pretraining.runs import StudyFile
from hf_mxfp4.recipes.pretraining.summary import draw_overheads, summarize, tokens_to_target


FPROP = {"fprop.x", "fprop.weight"}
DGRAD = {"dgrad.grad", "dgrad.weight"}
WGRAD = {"wgrad.grad", "wgrad.x"}


def short_study(folder, *words):
    small = {
        "max_steps": 4, "extra_tokens": 0.5, "eval_steps": 2, "logging_steps": 2, "warmup_steps": 1,
        "sequence_length": 32, "per_device_train_batch_size": 4, "validation_sequences": 4,
        "hidden_size": 32, "num_layers": 1, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in small.items()]
    return main([*options, f"--output_dir={folder}", *words])


def test_a_study_end_to_end_continued_and_extended(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "study"
    summary = short_study(folder, "--arms", "baseline", "all_sr")
    assert summary["baseline"] == "full precision (float32)"
    assert summary["budget_tokens"] == 4 * 4 * 32
    assert summary["arms"]["baseline"]["n_quantized"] == 0
    assert summary["arms"]["all_sr"]["n_quantized"] == 7
    assert set(summary["arms"]["all_sr"]["quantized_operands"].values()) == {7}
    stored = json.loads((folder / "study.json").read_text())
    first, second = stored["runs"]
    assert first["parameters"] == second["parameters"]
    assert [tokens for tokens, _ in first["curve"]] == [0, 256, 512, 768]
    # The same weights before the first step, then another loss.
    assert first["curve"][0][1] == pytest.approx(second["curve"][0][1], rel=0.02)
    assert first["curve"][-1] != second["curve"][-1]
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (folder / "overheads.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "2 of 2 are missing" in out
    assert "token overhead" in out
    assert "dgrad.grad:7" in out

    # Nothing of it is trained again; an arm that is new is.
    trained = []
    train_arm = pretrain.train_arm

    def note_and_train(study, arm, *rest):
        trained.append(arm.name)
        return train_arm(study, arm, *rest)

    monkeypatch.setattr(pretrain, "train_arm", note_and_train)
    assert short_study(folder, "--arms", "baseline", "all_sr") == summary
    assert not trained
    more = short_study(folder, "--arms", "baseline", "all_sr", "all_random16")
    assert trained == ["all_random16"]
    assert set(more["arms"]) == {"baseline", "all_sr", "all_random16"}


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(tmp_path, monkeypatch, blank_pictures):
    words = ("--arms", "baseline", "all_sr", "--save_strategy", "steps", "--save_steps", "2", "--save_only_model=false")
    short_study(tmp_path, *words)
    path = tmp_path / "study.json"
    stored = json.loads(path.read_text())
    whole = stored["runs"].pop()
    path.write_text(json.dumps(stored))
    (tmp_path / "runs" / "all_sr-seed0" / "checkpoint-6" / "trainer_state.json").unlink()  # not wholly written
    trained = []
    training_step = transformers.Trainer.training_step
    monkeypatch.setattr(
        transformers.Trainer, "training_step", lambda *arguments: trained.append(1) or training_step(*arguments)
    )
    short_study(tmp_path, *words)
    resumed = json.loads(path.read_text())["runs"][1]
    assert resumed["steps"] == 6 and len(trained) == 2  # those after checkpoint-4
    assert resumed["curve"] == whole["curve"]
    assert len(whole["curve"]) == 4


def test_two_studies_do_not_write_into_one_folder(tmp_path, monkeypatch):
    def start_another(*arguments):
        with pytest.raises(SystemExit, match="another process is at work in"):
            short_study(tmp_path)
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "train_arm", start_another)
    with pytest.raises(KeyboardInterrupt):
        short_study(tmp_path)


@pytest.mark.parametrize("scheme", ["{preset: w4a4}", "{preset: w4a16, modules_to_not_convert: [down_proj]}"])
def test_a_run_is_not_continued_or_taken_under_another_scheme(scheme, tmp_path, monkeypatch, blank_pictures):
    words = ("--arms", "baseline", "mine", "--save_strategy", "steps", "--save_steps", "2", "--extra_arms")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StudyFile, "add", Mock(side_effect=[None, KeyboardInterrupt]))  # as if killed at the end
        short_study(tmp_path, *words, "{mine: {preset: w4a16}}")
    with pytest.raises(SystemExit, match="checkpoint-6 has a run of arm 'mine' with .*another name"):
        short_study(tmp_path, *words, f"{{mine: {scheme}}}")
    assert short_study(tmp_path, *words, "{mine: {preset: w4a16}}")["arms"]["mine"]["n_quantized"] == 7
    # Finished, it is that scheme's too.
    with pytest.raises(SystemExit, match="study.json has a run of arm 'mine' with .*another name"):
        short_study(tmp_path, *words, f"{{mine: {scheme}}}")


def test_a_study_is_not_continued_with_other_options(tmp_path, blank_pictures):
    short_study(tmp_path, "--arms", "baseline")
    with pytest.raises(SystemExit, match="holds a study with max_steps=4"):
        short_study(tmp_path, "--arms", "baseline", "--max_steps=6")


def test_initial_weights_that_were_not_wholly_written_are_written_again(tmp_path, blank_pictures):
    folder = tmp_path / "initial-seed0"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert short_study(tmp_path, "--arms", "baseline")["steps"] == 6
    assert (folder / "model.safetensors").is_file()


def arms(*names, extra=None, rule="floor"):
    return {arm.name: arm for arm in choose_arms(["baseline", *names], extra, rule)}


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
    expected = {"all": "None", "all_sr": "None", "all_random16": "random-16"}
    assert rotations == expected | {f"all_deterministic{size}": f"deterministic-{size}" for size in (16, 32)}
    rounding = chosen["all_sr"].config.gemms()
    assert str(rounding.dgrad.left) == str(rounding.wgrad.left) == "mxfp4+even+stochastic"
    assert str(rounding.wgrad.right) == "mxfp4+even"
    assert str(rounding.fprop.right) == "mxfp4+even+32x32"
    assert not chosen["all"].config.gemms().is_random


@pytest.mark.parametrize(
    "names, extra, message",
    [
        (["baseline", "al"], None, "did you mean 'all'"),
        (["all"], None, "must be distinct, with 'baseline'"),
        (["baseline", "x"], {"x": {"preset": "w4a3"}}, "arm x: "),
        (["baseline"], {"all": {}}, "built-in arm"),
        (["baseline"], ["all"], "must map names"),
    ],
)
def test_bad_arms(names, extra, message):
    with pytest.raises(ValueError, match=message):
        choose_arms(names, extra, "floor")


def test_entropy_is_that_of_the_generator():
    language = Language()
    texts, entropy = generate(language, "validation", 5000)
    characters = sum(len(text) + 1 for text in texts)
    assert characters >= 5000 > characters - len(texts[-1]) - 1
    expected = sum(nats for _, nats in itertools.islice(language.documents("validation"), len(texts))) / characters
    assert entropy == pytest.approx(expected)
    assert 0.5 < entropy < math.log(len(ALPHABET))


def options(**changes):
    return StudyArguments(sequence_length=32, validation_sequences=4, **changes)


def test_order_follows_the_seed_alone():
    corpus = load_corpus(options(), 32 * 50)
    first = corpus.ordered(1, 8)
    other = corpus.ordered(2, 10)
    again = load_corpus(options(), 32 * 50).ordered(1, 8)
    assert [row.tolist() for row in first["input_ids"]] == [row.tolist() for row in again["input_ids"]]
    assert len(first) == 48 and len(other) == 50  # whole steps
    rows = {tuple(row.tolist()) for row in other["input_ids"]}
    assert len(rows) == 50
    assert {tuple(row.tolist()) for row in first["input_ids"]} < rows
    with pytest.raises(ValueError, match="50 sequences, less than a step of 51"):
        corpus.ordered(1, 51)


@pytest.fixture
def hub(monkeypatch):
    """`hub(**rows)` makes the rows of each split what a dataset on the Hub has."""

    def give(column="text", **texts):
        splits = {name: Dataset.from_dict({column: rows}).to_iterable_dataset() for name, rows in texts.items()}
        monkeypatch.setattr(corpora, "load_dataset", lambda *_, split, streaming: splits[split])
        return options(corpus="hub")

    return give


def test_a_streamed_dataset(hub):
    corpus = load_corpus(hub(train=["ab" * 100], validation=["cd" * 100]), 64)
    first, *others = corpus.train
    assert corpus.tokenizer.decode(first["input_ids"]) == "ab" * 16
    assert 1 + len(others) == 201 // 32 and corpus.entropy is None  # 200 bytes and the end of the document
    with pytest.raises(ValueError, match="validation text has 0 sequences of 32"):
        load_corpus(hub(train=["ab" * 100], validation=["abc"]), 64)
    with pytest.raises(ValueError, match="text_column can be body"):
        load_corpus(hub("body", train=["abc"], validation=["abc"]), 64)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--extra_tokens", "-1"], "extra_tokens=-1.0"),
        (["--corpus", "c4"], "must be one of generated, hub"),
        (["--seeds", "1", "1"], "distinct"),
        (["--max_steps", "-1"], "max_steps must be"),
        (["--scale_rule", "up"], "scale_rule='up'"),
    ],
)
def test_bad_options(words, message):
    with pytest.raises(ValueError, match=message):
        parse(words)


def test_every_arm_trains_beyond_the_budget_up_to_an_evaluation():
    study = parse(["--max_steps", "100", "--eval_steps", "30", "--extra_tokens", "0.4"])
    assert study.total_steps == 150
    assert study.tokens_per_step == 8 * 128
    assert parse(["--max_steps", "100", "--eval_steps", "10", "--extra_tokens", "0.4"]).total_steps == 140
    assert parse(["--max_steps", "100", "--eval_steps", "10", "--extra_tokens", "0"]).total_steps == 100


FALLING = [(0, 4.0), (100, 3.0), (200, 2.5), (300, 2.0)]


@pytest.mark.parametrize(
    "curve, target, expected",
    [
        (FALLING, 2.75, 150.0),  # half way between two evaluations
        (FALLING, 3.0, 100.0),  # at one
        (FALLING, 1.99, None),  # never
        (FALLING, 4.0, 0.0),  # before the first step
        ([(50, 1.0), (60, 0.5)], 2.0, 50.0),  # at once
        ([(0, 4.0), (100, 2.0), (200, 3.0), (300, 2.0)], 2.5, 75.0),  # the first time counts
        ([(0, 4.0), (100, None)], 3.0, None),  # diverged
        ([(0, 4.0), (100, 3.0), (200, None)], 3.5, 50.0),  # diverged after it had got there
    ],
)
def test_tokens_to_target(curve, target, expected):
    assert tokens_to_target(curve, target) == expected


def run(arm, seed, curve):
    return {"arm": arm, "seed": seed, "curve": curve}


# The target at 90 % of 300 tokens is 2.15.
HALF_SPEED = [(0, 4.0), (200, 3.0), (400, 2.5), (600, 2.0)]
SHALLOW = [(0, 4.0), (300, 3.0), (600, 2.5)]
LONG = [*FALLING, (600, 1.9)]


def test_overhead_and_gap_are_paired_by_seed():
    runs = [run("baseline", 0, LONG), run("baseline", 1, LONG), run("all", 0, HALF_SPEED), run("all", 1, LONG)]
    summary = summarize(runs, budget=300, target_fraction=0.9)
    assert summary["targets"] == {"0": pytest.approx(2.15), "1": pytest.approx(2.15)}
    assert summary["arms"]["baseline"]["overhead"]["by_seed"] == [0.0, 0.0]
    result = summary["arms"]["all"]
    assert result["overhead"]["by_seed"] == pytest.approx([1.0, 0.0])  # twice the tokens, the same
    assert result["overhead"]["mean"] == pytest.approx(0.5)
    assert result["overhead"]["n"] == 2
    assert result["gap"]["by_seed"] == pytest.approx([0.75, 0.0])


def test_a_target_that_is_not_reached_is_a_result():
    runs = [run("baseline", s, LONG) for s in (0, 1)] + [run("all", 0, SHALLOW), run("all", 1, HALF_SPEED)]
    overhead = summarize(runs, budget=300, target_fraction=0.9)["arms"]["all"]["overhead"]
    assert overhead["by_seed"] == [None, pytest.approx(1.0)]
    assert (overhead["mean"], overhead["n"], overhead["n_finite"]) == (None, 2, 1)
    assert draw_overheads(summarize(runs, budget=300, target_fraction=0.9)["arms"]).axes


def test_a_run_that_diverged_is_a_result():
    runs = [run("baseline", 0, LONG), run("all", 0, [(0, 4.0), (100, None)])]
    result = summarize(runs, budget=300, target_fraction=0.9)["arms"]["all"]
    assert result["overhead"]["mean"] is None
    assert result["gap"]["by_seed"] == [None]


@pytest.mark.parametrize(
    "curve, message",
    [
        ([(0, 4.0), (100, None)], "the baseline diverged"),
        ([(0, 4.0), (280, 2.0), (290, 1.9), (300, None)], "the baseline diverged"),  # behind the target
        ([(0, 4.0), (100, 5.0), (300, 7.0)], "no lower than before training"),
    ],
)
def test_without_a_baseline_that_learned_there_is_no_target(curve, message):
    with pytest.raises(ValueError, match=f"{message}.*learning_rate"):
        summarize([run("baseline", 0, curve), run("all", 0, FALLING)], budget=300, target_fraction=0.9)
