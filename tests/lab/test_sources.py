# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints and texts come from, which tensors are analysed, and what is said when there is none."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from tiny_models import make_model, make_tokenizer

from hf_mxfp4.lab import SourceError, TextOptions, open_source
from hf_mxfp4.lab.layers import classify
from hf_mxfp4.module_names import find_layers
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer


INDEX = "model.safetensors.index.json"


def test_a_sharded_folder(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    source = open_source(str(folder))
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2 and list(source.expected) == files
    assert (source.name, source.kind) == (folder.name, "folder")
    assert source.config["model_type"] == "qwen2"
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {name: shard for shard, names in source.expected.items() for name in names} == index
    assert source.path(files[0]) == folder / files[0]


def test_a_folder_of_one_file_and_that_file_itself(checkpoint):
    folder = Path(checkpoint())
    source = open_source(str(folder))
    assert source.expected == {"model.safetensors": ()}
    alone = open_source(str(folder / "model.safetensors"))
    assert (alone.name, alone.kind, alone.expected) == ("model", "file", source.expected)
    assert alone.config == source.config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "gone", "does not exist; give a checkpoint's folder, a .safetensors file or a hub id"),
        (lambda d: d, "holds no .safetensors file$"),
        (lambda d: (d / "pytorch_model.bin").touch() or d, "it has .bin files: convert them to safetensors first"),
        (lambda d: (d / "m.gguf").touch() or d / "m.gguf", "is not a .safetensors file"),
        (lambda d: (d / INDEX).write_text("{") and d, "cannot be read"),
        (lambda d: (d / "config.json").write_text("[]") and d, "config.json is not a JSON object"),
    ],
)
def test_nothing_to_analyse(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        open_source(str(make(tmp_path)))


def test_an_adapter_is_no_model(tmp_path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SourceError, match="holds an adapter"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("name", ["./gone", "/gone", "a/b/c", "with space"])
def test_no_hub_is_asked_for_what_cannot_be_an_id(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(SourceError, match="does not exist"):
        open_source(name)


def test_a_model_on_the_hub(checkpoint, monkeypatch):
    folder, asked = Path(checkpoint(shard_size="60KB")), []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: asked.append(options) or folder)
    source = open_source("someone/model")
    assert (source.name, source.kind) == ("someone/model", "hub")
    assert source.expected == open_source(str(folder)).expected and source.folder == folder
    assert asked == [{"allow_patterns": ["*.safetensors", "*.json"], "ignore_patterns": ["*/*", "consolidated*"]}]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "not in the local cache, and the Hub cannot be reached"),
        (OSError("404: nobody/nothing"), "404: nobody/nothing"),
    ],
)
def test_what_the_hub_lacks(error, message, monkeypatch):
    def download(repo, **options):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(SourceError, match=f"neither a local path nor a readable model on the Hub: .*{message}"):
        open_source("nobody/nothing")


BF16 = torch.bfloat16
VECTOR, HEAD, EMBEDDING = "norm, bias or other vector", "head, router or other tower", "embedding"
OTHER = "not the weight of a linear layer"


@pytest.mark.parametrize(
    ("name", "shape", "skipped"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 32), None),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (64, 32), None),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 32), None),
        ("model.layers.0.input_layernorm.weight", (32,), VECTOR),
        ("model.layers.0.self_attn.q_proj.bias", (32,), VECTOR),
        ("model.norm.weight", (1, 32), VECTOR),
        ("lm_head.weight", (64, 32), HEAD),
        ("model.layers.0.mlp.gate.weight", (4, 32), HEAD),
        ("visual.blocks.0.attn.qkv.weight", (96, 32), HEAD),
        ("model.embed_tokens.weight", (64, 32), EMBEDDING),
        ("transformer.wte.weight", (64, 32), EMBEDDING),
        ("transformer.wpe.weight", (64, 32), EMBEDDING),
        ("bert.embeddings.word_embeddings.weight", (64, 32), EMBEDDING),
        ("gpt_neox.embed_in.weight", (64, 32), EMBEDDING),
        ("tok_embeddings.weight", (64, 32), EMBEDDING),
        ("model.layers.0.mixer.conv1d.weight", (64, 1, 4), OTHER),
        ("model.layers.0.mixer.A_log", (64, 16), OTHER),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 64), OTHER),
    ],
)
def test_decisions(name, shape, skipped):
    assert classify(name, shape, BF16) == (skipped or -1)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 16), torch.uint8),
        ("model.layers.0.mlp.up_proj.weight", (64, 32), torch.float8_e4m3fn),
        ("model.layers.0.mlp.up_proj.weight_packed", (64, 16), torch.uint8),
        ("model.layers.0.mlp.up_proj.weight_scale", (64, 1), torch.uint8),
        ("model.layers.0.mlp.up_proj.qweight", (4, 64), torch.int32),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", (4, 64, 2, 16), torch.uint8),
        ("model.layers.0.mlp.experts.down_proj", (4, 64, 32), torch.float8_e4m3fn),
    ],
)
def test_quantized_storage_is_recognised(name, shape, dtype):
    assert classify(name, shape, dtype) is None


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
def test_the_same_layers_as_the_quantizer(family):
    model = make_model(family)
    chosen = {
        name.removesuffix(".weight")
        for name, tensor in model.state_dict().items()
        if classify(name, tensor.shape, tensor.dtype) == -1
    }
    assert chosen == {name for name, layer in find_layers(model)[0].items() if isinstance(layer, torch.nn.Linear)}


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
        (["{\n"], None, "d.jsonl:1: not a line of JSON"),
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
