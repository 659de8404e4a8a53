# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints and texts come from, which tensors are analysed, and what is said when there is none; schemes as
text, and as a user names them for a model."""

import itertools
import json
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from tables import MACROS, RULES
from tiny_models import make_model, make_tokenizer

from hf_mxfp4 import MXFP4RLConfig, lab
from hf_mxfp4.checkpoint import open_checkpoint
from hf_mxfp4.lab import PAPER_SCHEMES, SourceError, TextOptions, open_source, read_schemes
from hf_mxfp4.lab.errors.layers import classify
from hf_mxfp4.lab.evaluation.schemes import for_evaluation
from hf_mxfp4.model.layer_names import find_layers
from hf_mxfp4.numerics import QuantScheme, parse_scheme
from hf_mxfp4.recipes.common.checkpoints import read_stored
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer


INDEX = "model.safetensors.index.json"


def test_a_sharded_folder(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    source = open_source(str(folder))
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert list(source.expected) == files
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


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (["checkpoint-9", "checkpoint-10", "policy"], "policy"),
        (["checkpoint-9", "checkpoint-10"], "checkpoint-10"),
    ],
)
def test_the_folder_of_a_run_names_its_model(names, best, tmp_path):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for read in (open_source, open_checkpoint, lab.load, read_stored):
        with pytest.raises((ValueError, OSError), match=f"give {tmp_path / best}$"):
            read(str(tmp_path))


@pytest.mark.parametrize("read", [open_source, lab.load, read_stored])
def test_a_folder_that_does_not_exist_is_named_once(read, tmp_path):
    with pytest.raises((ValueError, OSError), match="(does not exist|there is no such folder)") as caught:
        read(str(tmp_path / "gone"))
    assert str(caught.value).count("gone") == 1


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
    folder = Path(checkpoint(shard_size="60KB"))
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: asked.append(options) or folder)
    source = open_source("someone/model")
    assert (source.name, source.kind) == ("someone/model", "hub")
    assert source.expected == open_source(str(folder)).expected
    assert source.folder == folder
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
VECTOR = "norm, bias or other vector"
HEAD = "head, router or other tower"
EMBEDDING = "embedding"
OTHER = "not the weight of a linear layer"


@pytest.mark.parametrize(
    ("name", "shape", "skipped"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 32), None),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 32), None),
        ("model.layers.0.input_layernorm.weight", (32,), VECTOR),
        ("model.norm.weight", (1, 32), VECTOR),
        ("lm_head.weight", (64, 32), HEAD),
        ("model.layers.0.mlp.gate.weight", (4, 32), HEAD),
        ("visual.blocks.0.attn.qkv.weight", (96, 32), HEAD),
        ("model.embed_tokens.weight", (64, 32), EMBEDDING),
        ("transformer.wte.weight", (64, 32), EMBEDDING),
        ("tok_embeddings.weight", (64, 32), EMBEDDING),
        ("model.layers.0.mixer.conv1d.weight", (64, 1, 4), OTHER),
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
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", (4, 64, 2, 16), torch.uint8),
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
    assert read(path) == ["a", "b", "c"]
    assert read(path, samples=2) == ["a", "b"]


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
    tokenizer = build_char_tokenizer("ab")
    options = TextOptions("d.jsonl", max_length=3)
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


CHAT = [{"role": "user", "content": "48"}, {"role": "assistant", "content": " clips"}]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "48", "completion": " clips"}, "<|im_start|>48 clips<|im_end|>"),
        ({"messages": CHAT}, "<|im_start|>48<|im_end|><|im_start|> clips<|im_end|>"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "<|im_start|>48<|im_end|><|im_start|> clips<|im_end|>"),
    ],
)
def test_given_completions_have_the_tokens_of_supervised_training(tmp_path, row, text):
    tokenizer = make_tokenizer("qwen2", begins=True)
    options = TextOptions(str(write(tmp_path / "d.jsonl", [row])))
    (found,) = options.tokens(tokenizer, options.read())
    assert tokenizer.decode(found[0]) == text


TEXT = "The quick brown fox can't jump over 1234 lazy dogs.\n\nHe ran."


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    return str(tmp_path / "book.txt")


def test_a_running_text_is_cut_into_windows(book):
    tokenizer = make_tokenizer("gpt-2")
    options = TextOptions(book, max_length=10)
    windows = options.tokens(tokenizer, options.read())
    assert torch.equal(torch.cat(windows, 1), tokenizer(TEXT, return_tensors="pt").input_ids)
    assert {window.shape[1] for window in windows[:-1]} == {10}
    two = TextOptions(book, samples=2, max_length=10).tokens(tokenizer, [TEXT])
    assert [window.tolist() for window in two] == [window.tolist() for window in windows[:2]]


def test_windows_begin_as_texts_do(book):
    tokenizer = make_tokenizer("gpt-2", begins=True)
    windows = TextOptions(book, max_length=10).tokens(tokenizer, [TEXT])
    assert {int(window[0, 0]) for window in windows} == {tokenizer.bos_token_id}
    assert windows[0].shape == (1, 10)
    ids = make_tokenizer("gpt-2")(TEXT, return_tensors="pt").input_ids
    assert torch.equal(torch.cat([window[:, 1:] for window in windows], 1), ids)


def test_a_running_text_without_words(tmp_path):
    (tmp_path / "book.txt").write_text(" \n")
    with pytest.raises(SourceError, match="book.txt has no text"):
        read(tmp_path / "book.txt")


ROWS = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})


def test_texts_of_a_saved_dataset(tmp_path):
    ROWS.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", samples=2) == ["a", "b"]


def test_folders_that_are_no_dataset(tmp_path):
    datasets.DatasetDict(train=ROWS, test=ROWS).save_to_disk(tmp_path / "splits")
    with pytest.raises(SourceError, match="holds the splits train, test"):
        read(tmp_path / "splits")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="cannot be read as texts"):
        read(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("openai/gsm8k:main:train", ("openai/gsm8k", "main", "train")),
        ("some/texts:validation", ("some/texts", None, "validation")),
        ("texts", ("texts", None, "test")),
    ],
)
def test_texts_of_the_hub(name, asked, monkeypatch):
    given = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, split: given.append((*words, split)) or ROWS)
    assert read(name, samples=1) == ["a"]
    assert given == [asked]


def test_the_string_of_every_scheme_reads_back():
    fallbacks = [None, 0.5, 1.0, 1 / 3]
    every = itertools.product(RULES, MACROS, fallbacks, ("nearest", "stochastic"), (1, 32))
    for rule, (size, search), alpha, rounding, rows in every:
        scheme = QuantScheme(rule, size, search, alpha, rounding, rows)
        assert parse_scheme(str(scheme)) == scheme
        assert parse_scheme(str(scheme).removeprefix("mxfp4+")) == scheme


def test_schemes_of_a_config():
    config = MXFP4RLConfig()
    assert parse_scheme("rceil+mbs128") == QuantScheme("rceil", 128, "static")
    assert parse_scheme("rceil+of0.5+mbs128-dynamic") == QuantScheme("rceil", 128, "dynamic", 0.5)
    assert parse_scheme(" mxfp4+rceil+nearest+1x32 ") == QuantScheme()
    assert parse_scheme("even+mbs128-blockwise_fp8") == config.weight_scheme
    assert parse_scheme(PAPER_SCHEMES[2]) == MXFP4RLConfig(preset="paper_a").activation_scheme


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no scale rule"),
        ("rciel", "no scale rule 'rciel'; did you mean 'rceil'"),
        ("rceil+mbs100-static", "macro_block=100 is not supported; choose one of None, 32, 64, 128, 256, 'row'"),
        ("rceil+mbs128-statik", "macro_search='statik' is not supported; choose one of 'static', 'dynamic'"),
        ("rceil+mbs64-blockwise", "needs macro_block=128"),
        ("rceil+ofhalf", "'ofhalf' is no part of a scheme; known are"),
        ("rceil+of0.5@0.1", "'of0.5@0.1' is no part of a scheme; did you mean 'of0.5'"),
        ("rceil+mbs128+mbs64", "macro_block is given twice"),
    ],
)
def test_messages(text, message):
    with pytest.raises(ValueError, match="scheme") as error:
        parse_scheme(text)
    assert message in str(error.value)


FULL = "full precision"


@pytest.mark.parametrize(
    ("text", "weights", "activations", "bits"),
    [
        ("w4a16:rceil", "mxfp4+rceil", FULL, (4.25, None, 4.25)),
        ("w4a4:even+mbs128-blockwise", *["mxfp4+even+mbs128-blockwise"] * 2, (4.3125, 4.3125, 4.3125)),
        ("w4a8:rceil", "mxfp4+rceil", "fp8", (4.25, 8.0, 6.125)),
        ("w4a8:even/mxfp8", "mxfp4+even", "mxfp8", (4.25, 8.25, 6.25)),
        ("rceil+mbs128-hybrid", "mxfp4+rceil+mbs128-dynamic", "mxfp4+rceil+mbs128-static", (4.3125, 4.3125, 4.3125)),
        ("rceil+32x32", "mxfp4+rceil+32x32", "mxfp4+rceil", (4.25, 4.25, 4.25)),
        ("w4a4:even/rceil+of1", "mxfp4+even", "mxfp4+rceil+of1", (4.25, 8.5, 6.375)),
        ("default", "mxfp4+even+mbs128-blockwise_fp8", "fp8", (4.3125, 8.0, 6.15625)),
        ("w8a8", "fp8", "fp8", (8.0, 8.0, 8.0)),
        ("nvfp4", "nvfp4", "nvfp4", (4.5, 4.5, 4.5)),
        ("paper_b", "mxfp4+floor+32x32", "mxfp4+floor", (4.25, 4.25, 4.25)),
    ],
)
def test_what_a_text_means(text, weights, activations, bits):
    (scheme,) = read_schemes([f" {text} "])
    fprop = scheme.config.gemms().fprop
    assert (scheme.name, str(fprop.right), str(fprop.left)) == (text, weights, activations)
    assert (scheme.weight_bits, scheme.activation_bits, scheme.bits) == bits
    assert scheme.config.mode == "qat"
    assert not scheme.config.dither_ties


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("own.json", '{"preset": "w4a4", "macro_block": null}', {"preset": "w4a4", "macro_block": None}),
        ("own.yaml", "scale_rule: even\npreset: w4a16\n", {"scale_rule": "even", "preset": "w4a16"}),
        ("config.json", '{"quantization_config": {"mode": "packed"}}', {"preset": "w4a16"}),
    ],
)
def test_options_from_files(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    (scheme,) = read_schemes([f"config:{tmp_path / name}"])
    assert scheme.config == for_evaluation(MXFP4RLConfig(**expected))


def test_layers_that_a_checkpoint_leaves_alone_are_left_alone_by_other_schemes():
    own = MXFP4RLConfig(modules_to_not_convert=["mlp"])
    schemes = read_schemes(["own", "rceil"], own)
    assert [scheme.config.modules_to_not_convert for scheme in schemes] == [("mlp",), ("mlp",)]


def test_equal_schemes_count_once():
    schemes = read_schemes(["own", "rceil", "default"], MXFP4RLConfig(stochastic_seed=3))
    assert [scheme.name for scheme in schemes] == ["own", "rceil"]
    assert schemes[0].config.stochastic_seed == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rciel", "--scheme rciel: .*did you mean 'rceil'.*known are 'default'"),
        ("w4a4:", "names no scale rule"),
        ("w4a16:rceil/even", "w4a16 quantizes weights alone in MXFP4; give one scheme"),
        ("w4a4:rceil/even+32x32", "tiles of 32x32 are for weights"),
        ("w4a4:full/rceil", "no scale rule 'full'"),
        ("own", "no scheme of its own"),
        ("config:gone.json", "gone.json cannot be read"),
        ("config:{}/list.yaml", "does not hold options of MXFP4RLConfig"),
        ("config:{}/wrong.json", "did you mean 'scale_rule'"),
    ],
)
def test_what_cannot_be_read(tmp_path, text, message):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "wrong.json").write_text('{"scale_rul": "even"}')
    with pytest.raises(SourceError, match=message):
        read_schemes([text.format(tmp_path)])
