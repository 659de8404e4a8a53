# SPDX-License-Identifier: Apache-2.0
"""Texts from files and datasets, and their tokens."""

import json

import pytest
import torch
from tiny_tokenizers import make_tokenizer

from hf_mxfp4.lab import SourceError, TextOptions
from recipes.tasks.tiny_model import build_char_tokenizer


def read(dataset, field=None, samples=8):
    return TextOptions(str(dataset), field, samples).read()


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("field", ["text", "prompt", "question", "content"])
def test_the_field_is_found(tmp_path, field):
    path = write(tmp_path / "d.jsonl", [{"id": 1, field: "a"}, "\n", {"id": 2, field: "b"}, {"id": 3, field: "c"}])
    assert read(path) == ["a", "b", "c"] and read(path, samples=2) == ["a", "b"]


@pytest.mark.parametrize(
    ("rows", "field", "message"),
    [
        ([], None, "has no rows"),
        ([{"body": "x"}], None, "has none of the fields text, question,answer, .*it has body"),
        ([{"text": ["x"]}], None, "has none of the fields"),
        ([{"text": "x"}, {"prompt": "y"}], None, "row 2 of .* has no text in 'text' \\(it has prompt\\)"),
        ([{"text": "x"}], "body", "row 1 of .* has no text in 'body'"),
        (["{\n"], None, "row 1 of .* is not JSON"),
        ([[1]], None, "row 1 of .* is not a JSON object"),
    ],
)
def test_messages_about_datasets(tmp_path, rows, field, message):
    with pytest.raises(SourceError, match=message):
        read(write(tmp_path / "d.jsonl", rows), field)
    with pytest.raises(SourceError, match="cannot be read"):
        read(tmp_path / "gone.jsonl")


def test_tokens_are_cut_and_never_empty():
    tokenizer, options = build_char_tokenizer("ab"), TextOptions("d.jsonl", max_length=3)
    assert [ids.shape[-1] for ids in options.tokens(tokenizer, ["abab", "", "a"])] == [3, 1]
    with pytest.raises(SourceError, match="no token"):
        options.tokens(tokenizer, [""])
    with pytest.raises(SourceError, match="cannot encode the texts"):
        options.tokens(tokenizer, ["xyz"])


def test_texts_of_several_fields(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"question": "1 + 1?", "answer": "2", "note": 3}])
    assert read(path, "question") == ["1 + 1?"]
    assert read(path) == read(path, "question, answer") == ["1 + 1?\n2"]
    with pytest.raises(SourceError, match=r"row 1 of .* has no text in 'question,note' \(it has question, answer"):
        read(path, "question,note")


def test_a_running_text_is_cut_into_windows(tmp_path):
    file, text = tmp_path / "book.txt", "The quick brown fox can't jump over 1234 lazy dogs.\n\nHe ran."
    file.write_text(text)
    tokenizer, options = make_tokenizer("gpt-2"), TextOptions(str(file), max_length=10)
    ids = tokenizer(text, return_tensors="pt").input_ids
    pieces = options.tokens(tokenizer, options.read())
    assert torch.equal(torch.cat(pieces, 1), ids) and {piece.shape[1] for piece in pieces[:-1]} == {10}
    two = TextOptions(str(file), samples=2, max_length=10).tokens(tokenizer, [text])
    assert [piece.tolist() for piece in two] == [piece.tolist() for piece in pieces[:2]]
    # Each begins as texts do.
    beginning = make_tokenizer("gpt-2", begins=True)
    pieces = options.tokens(beginning, [text])
    assert {int(piece[0, 0]) for piece in pieces} == {beginning.bos_token_id} and pieces[0].shape == (1, 10)
    assert torch.equal(torch.cat([piece[:, 1:] for piece in pieces], 1), ids)
    file.write_text(" \n")
    with pytest.raises(SourceError, match="book.txt has no text"):
        options.read()
    with pytest.raises(SourceError, match="no token"):
        options.tokens(tokenizer, [""])


def test_texts_of_datasets(tmp_path, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    rows.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", samples=2) == ["a", "b"]
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "splits")
    with pytest.raises(SourceError, match="holds the splits train, test; give the folder of one of them"):
        read(tmp_path / "splits")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="cannot be read as texts"):
        read(tmp_path / "empty")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, split: asked.append((*given, split)) or rows)
    for name in ("openai/gsm8k:main:train", "some/texts:validation", "texts"):
        assert read(name, samples=1) == ["a"]
    assert asked == [("openai/gsm8k", "main", "train"), ("some/texts", None, "validation"), ("texts", None, "test")]
