# SPDX-License-Identifier: Apache-2.0
"""Texts from files and datasets, and their tokens."""

import json

import pytest
import torch
from tiny_tokenizers import make_tokenizer

from hf_mxfp4.lab import SourceError, TextOptions
from hf_mxfp4.lab.texts import WHOLE_FIELDS, read_texts, tokenized, windows


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("field", ["text", "prompt", "question", "content"])
def test_the_field_is_found(tmp_path, field):
    path = write(tmp_path / "d.jsonl", [{"id": 1, field: "a"}, "\n", {"id": 2, field: "b"}, {"id": 3, field: "c"}])
    assert read_texts(path, None, 8) == ["a", "b", "c"]
    assert read_texts(path, None, 2) == ["a", "b"]


def test_a_named_field_wins(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"text": "a", "body": "b"}])
    assert read_texts(path, "body", 8) == ["b"]


@pytest.mark.parametrize(
    ("rows", "field", "message"),
    [
        ([], None, "has no rows"),
        ([{"body": "x"}], None, "has none of the fields text, prompt, question, content.*it has body"),
        ([{"text": ["x"]}], None, "has none of the fields"),
        ([{"text": "x"}, {"prompt": "y"}], None, "row 2 of .* has no text in 'text' \\(it has prompt\\)"),
        ([{"text": "x"}], "body", "row 1 of .* has no text in 'body'"),
        (["{\n"], None, "row 1 of .* is not JSON"),
        ([[1]], None, "row 1 of .* is not a JSON object"),
    ],
)
def test_messages_about_datasets(tmp_path, rows, field, message):
    with pytest.raises(SourceError, match=message):
        read_texts(write(tmp_path / "d.jsonl", rows), field, 8)


def test_a_missing_dataset(tmp_path):
    with pytest.raises(SourceError, match="cannot be read"):
        read_texts(tmp_path / "gone.jsonl", None, 8)


def test_tokens_are_cut_and_never_empty():
    from recipes.tasks.tiny_model import build_char_tokenizer

    tokenizer = build_char_tokenizer("ab")
    assert [ids.shape[-1] for ids in tokenized(tokenizer, ["abab", "", "a"], 3)] == [3, 1]
    with pytest.raises(SourceError, match="no token"):
        tokenized(tokenizer, [""], 3)
    with pytest.raises(SourceError, match="cannot encode the texts"):
        tokenized(tokenizer, ["xyz"], 3)


def test_texts_of_several_fields(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"question": "1 + 1?", "answer": "2", "note": 3}])
    assert read_texts(path, None, 8) == ["1 + 1?"]
    assert read_texts(path, None, 8, WHOLE_FIELDS) == read_texts(path, "question, answer", 8) == ["1 + 1?\n2"]
    with pytest.raises(SourceError, match=r"row 1 of .* has no text in 'question,note' \(it has question, answer"):
        read_texts(path, "question,note", 8)


def test_a_running_text_is_cut_into_windows(tmp_path):
    file, text = tmp_path / "book.txt", "The quick brown fox can't jump over 1234 lazy dogs.\n\nHe ran."
    file.write_text(text)
    assert read_texts(file, None, 1) == [text]
    tokenizer = make_tokenizer("gpt-2")
    ids = tokenizer(text, return_tensors="pt").input_ids
    pieces = windows(tokenizer, text, 10, 100)
    assert torch.equal(torch.cat(pieces, 1), ids) and {piece.shape[1] for piece in pieces[:-1]} == {10}
    assert [piece.tolist() for piece in windows(tokenizer, text, 10, 2)] == [piece.tolist() for piece in pieces[:2]]
    # Each begins as texts do.
    beginning = make_tokenizer("gpt-2", begins=True)
    pieces = windows(beginning, text, 10, 100)
    assert {int(piece[0, 0]) for piece in pieces} == {beginning.bos_token_id} and pieces[0].shape == (1, 10)
    assert torch.equal(torch.cat([piece[:, 1:] for piece in pieces], 1), ids)
    options = TextOptions(str(file), samples=2, max_length=10)
    assert list(map(torch.Tensor.tolist, options.tokens(tokenizer, options.read()))) == [
        piece.tolist() for piece in windows(tokenizer, text, 10, 2)
    ]
    file.write_text(" \n")
    with pytest.raises(SourceError, match="book.txt has no text"):
        read_texts(file, None, 1)
    with pytest.raises(SourceError, match="no token"):
        windows(tokenizer, "", 10, 1)


def test_texts_of_datasets(tmp_path, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    rows.save_to_disk(tmp_path / "saved")
    assert read_texts(tmp_path / "saved", None, 2) == ["a", "b"]
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "splits")
    with pytest.raises(SourceError, match="holds the splits train, test; give the folder of one of them"):
        read_texts(tmp_path / "splits", None, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="cannot be read as texts"):
        read_texts(tmp_path / "empty", None, 2)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, split: asked.append((*given, split)) or rows)
    for name in ("openai/gsm8k:main:train", "some/texts:validation", "texts"):
        assert read_texts(name, None, 1) == ["a"]
    assert asked == [("openai/gsm8k", "main", "train"), ("some/texts", None, "validation"), ("texts", None, "test")]
