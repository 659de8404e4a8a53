# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: an error that names the file, and the tensor if it is a packed one; never a wrong model. Those
that look unusual and are whole load: other heads, renamed tensors, experts, subsets of files."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_bits import IDS, logits, shards
from tiny_models import make_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
)

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import (
    CheckpointError,
    ShardError,
    export,
    model_dtype,
    open_checkpoint,
    pack_checkpoint,
    read_header,
    verify_folder,
)
from hf_mxfp4.lab import open_source


MODES = ["qat", "packed"]
KINDS = ["qat", "qat-sharded", "packed", "packed-sharded"]
LINEAR = "model.layers.0.mlp.up_proj"  # [64, 32]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Undamaged checkpoints of each kind: folder and logits."""
    base = tmp_path_factory.mktemp("damage")
    make_model("qwen2", layers=1, hidden=32, intermediate=64).save_pretrained(base / "base")
    result = {}
    for kind in KINDS:
        model = AutoModelForCausalLM.from_pretrained(base / "base", quantization_config=MXFP4RLConfig())
        if kind.startswith("packed"):
            model = hf_mxfp4.pack(model)
        size = {"qat": "20KB", "packed": "7KB"}[kind.split("-")[0]] if "sharded" in kind else "5GB"
        model.save_pretrained(base / kind, max_shard_size=size)
        result[kind] = base / kind, logits(model)
    assert all((len(shards(result[kind][0])) > 2) == ("sharded" in kind) for kind in KINDS)
    return result


@pytest.fixture
def damaged(originals, tmp_path):
    def copy(kind: str) -> Path:
        shutil.copytree(originals[kind][0], tmp_path / "model")
        return tmp_path / "model"

    return copy


def refusal(folder: Path, **options) -> str:
    with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
        AutoModelForCausalLM.from_pretrained(folder, **options)
    return str(caught.value)


def rewrite(file: Path, change) -> None:
    """Apply ``change`` to the tensors of a file and write it again as a valid file with the same metadata."""
    metadata = read_header(file).metadata
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)


def edit_config(folder: Path, scheme: dict | None = None, **edit) -> None:
    config = json.loads((folder / "config.json").read_text()) | edit
    config["quantization_config"] |= scheme or {}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_they_load_and_nothing_is_unpickled(originals, monkeypatch, kind):
    monkeypatch.setattr(torch, "load", None)
    folder, expected = originals[kind]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), expected)
    assert not verify_folder(folder).problems


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_truncated(damaged, kind, seed):
    folder = damaged(kind)
    rng = random.Random(f"{kind} {seed}")
    file = rng.choice(shards(folder))
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content)) if seed else 0])
    assert file.name in refusal(folder)


CHANGES = {
    "missing": lambda t: None,
    "int8": lambda t: t.to(torch.int8),
    "columns": lambda t: t[:, :-1] if t.shape[1] > 1 else t.repeat(1, 2),
    "rows": lambda t: t[:-1],
}


@pytest.mark.parametrize("field", ["weight", "weight_scale", "weight_macro"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_packed_tensor_that_is_missing_or_another(damaged, what, field):
    folder = damaged("packed")
    name = f"{LINEAR}.{field}"

    def change(tensors):
        value = CHANGES[what](tensors.pop(name))
        tensors |= {} if value is None else {name: value}

    rewrite(shards(folder)[0], change)
    # Of other shapes transformers names none since 5.18.
    assert name in (told := refusal(folder)) or what in ("rows", "columns") and "ignore_mismatched_sizes" in told
    (folder / "mxfp4_manifest.json").unlink()
    (problem,) = verify_folder(folder).problems
    assert problem.where == "config.json"
    assert name in problem.reason


@pytest.mark.parametrize("kind", ["qat", "packed"])
def test_verify_names_a_tensor_that_the_model_lacks(damaged, kind):
    """transformers itself only warns of it."""
    folder = damaged(kind)
    rewrite(shards(folder)[0], lambda tensors: tensors.pop("model.norm.weight"))
    (folder / "mxfp4_manifest.json").unlink()
    (problem,) = verify_folder(folder).problems
    assert "has no model.norm.weight" in problem.reason


@pytest.mark.parametrize("scheme", [{"mode": "qat"}, {"macro_search": "static"}, {"outlier_fallback": 0.25}])
def test_config_that_gives_the_bytes_another_meaning(damaged, scheme):
    folder = damaged("packed-sharded")
    edit_config(folder, scheme)
    assert "safetensors" in refusal(folder)


def test_config_that_contradicts_itself(damaged):
    folder = damaged("packed")
    edit_config(folder, {"macro_block": None})
    assert "macro_search='block_mantissas_fp8' has no effect" in refusal(folder)


def test_config_that_leaves_their_meaning_loads(damaged):
    folder = damaged("packed")
    edit_config(folder, {"preset": "w4a16", "scale_rule": "even", "backend": "eager"})
    assert AutoModelForCausalLM.from_pretrained(folder).quantization_report.n_quantized == 7


def test_packed_weights_without_their_config(damaged):
    folder = damaged("packed")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder, quantization_config=MXFP4RLConfig())
    assert "model.safetensors holds packed weights" in message
    assert "restore the config.json" in message


def test_shards_of_two_schemes(damaged):
    folder = damaged("packed-sharded")
    file = shards(folder)[0]
    record = json.loads(read_header(file).metadata["mxfp4_rl"])
    record["meaning"]["outlier_fallback"] = 0.25
    save_file(load_file(file), file, metadata={"format": "pt", "mxfp4_rl": json.dumps(record)})
    message = refusal(folder)
    assert file.name in message
    assert "not written together" in message


@pytest.mark.parametrize("kind", ["qat", "packed"])
def test_pickled_weights_are_refused_unread(damaged, monkeypatch, kind):
    folder = damaged(kind)
    file = shards(folder)[0]
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    monkeypatch.setattr(torch, "load", None)
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "has no weight_map"),
        ({"metadata": {}, "weight_map": {}}, "has no weight_map"),
        ({"metadata": {}, "weight_map": {"weight": 1}}, "places weight in 1, which is outside"),
        (
            {"metadata": {}, "weight_map": {"weight": "../model.safetensors"}},
            "'../model.safetensors', which is outside",
        ),
        ({"metadata": {}, "weight_map": {"bias": "model-1.safetensors"}}, "places bias in model-1.safetensors, but"),
    ],
)
def test_a_folder_with_an_index_that_says_nothing(tmp_path, index, words):
    with pytest.raises(CheckpointError, match="is not a folder; give that of a checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ShardError, match=words):
        open_checkpoint(tmp_path)


def test_config_names_the_weights_inside_of_the_folder_only(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (tmp_path / "outside.safetensors", folder / "inside.safetensors"):
        save_file({"weight": torch.ones(2, 2)}, file)
    (folder / "config.json").write_text(json.dumps({"transformers_weights": "inside.safetensors"}))
    assert open_checkpoint(folder).tensors["weight"].file == folder / "inside.safetensors"
    (folder / "config.json").write_text(json.dumps({"transformers_weights": "../outside.safetensors"}))
    with pytest.raises(CheckpointError, match="names weights outside of the folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("named", [None, "other.safetensors", INDEX])
def test_of_several_weights_those_that_transformers_loads_are_read(named, tmp_path):
    folder, other, sharded = (tmp_path / name for name in ("single", "other", "sharded"))
    for seed, (path, size) in enumerate([(folder, "5GB"), (other, "5GB"), (sharded, "30KB")]):
        make_model("llama", layers=1, seed=seed).save_pretrained(path, max_shard_size=size)
    shutil.copy(other / "model.safetensors", folder / "other.safetensors")
    for file in sharded.glob("model*"):
        shutil.copy(file, folder)
    if named is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": named}))
    expected = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    stored = open_checkpoint(folder).tensors
    assert torch.equal(stored["lm_head.weight"].read(), expected)
    files = {tensors[0].file for _, tensors in open_source(str(folder)).shards([])}
    assert files == {tensor.file for tensor in stored.values()}


def test_weights_that_no_file_can_be_read_from_are_named(tmp_path):
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    latin = shutil.copytree(tmp_path, tmp_path.with_name(os.fsdecode(b"name-\xe9")))
    with pytest.raises(ShardError, match="model.safetensors cannot be read: safetensors needs a path in UTF-8"):
        open_checkpoint(latin)
    (tmp_path / "model.safetensors").rename(tmp_path / "file.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"weight": "pipe.safetensors"}}))
    with pytest.raises(ShardError, match="pipe.safetensors is not a file"):
        open_checkpoint(tmp_path)


def test_the_error_of_the_largest_numbers_is_finite(tmp_path):
    model = make_model("llama", layers=1)
    model.get_submodule(LINEAR).weight.data[3, 40] = 3e38
    model.save_pretrained(tmp_path / "plain")
    packed = hf_mxfp4.pack(model, MXFP4RLConfig(mode="packed"))
    report = pack_checkpoint(tmp_path / "plain", tmp_path / "out", MXFP4RLConfig(mode="packed"))
    sqnr_db = packed.quantization_report.sqnr_db
    assert 20 < sqnr_db < 60
    assert report.total_sqnr_db == pytest.approx(sqnr_db, abs=0.1)


def test_the_dtype_is_named_or_that_of_the_largest_tensor(tmp_path):
    large = torch.ones(64, dtype=torch.float64)
    codes = torch.ones(4096, dtype=torch.uint8)
    save_file({"small": torch.ones(2), "large": large, "codes": codes}, tmp_path / "model.safetensors")
    for config, expected in (({"torch_dtype": "torch.bfloat16"}, torch.bfloat16), ({"dtype": "nn"}, torch.float64)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert model_dtype(open_checkpoint(tmp_path)) == expected


def save(tmp_path, model, mode, auto=AutoModelForCausalLM, **options):
    """Save a full-precision model, quantize it and save it again; the quantized one and its folder."""
    model.save_pretrained(tmp_path / "base")
    quantized = auto.from_pretrained(tmp_path / "base", quantization_config=MXFP4RLConfig(**options))
    if mode == "packed":
        quantized = hf_mxfp4.pack(quantized)
    quantized.save_pretrained(tmp_path / mode, max_shard_size="30KB")
    return quantized, tmp_path / mode


@torch.no_grad()
def same_logits(one, other) -> bool:
    return torch.equal(one(IDS)[0], other(IDS)[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_head_that_was_stored_too(tmp_path, mode):
    model, folder = save(tmp_path, make_model("qwen2", tie=True), mode)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["embed_tokens", "layers.0.mlp.up_proj", "layers.0.input_layernorm", "norm"])
def test_a_model_that_lacks_a_tensor_is_not_loaded(mode, name, tmp_path):
    make_model("llama", layers=1).save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors.pop(f"model.{name}.weight"))
    message = refusal(tmp_path, quantization_config=MXFP4RLConfig(mode=mode))
    assert f"model.{name}.weight is in no file of the checkpoint" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_packed(value, tmp_path):
    make_model("llama", layers=1).save_pretrained(tmp_path / "plain")
    rewrite(tmp_path / "plain" / "model.safetensors", lambda tensors: tensors[f"{LINEAR}.weight"][3, 40].fill_(value))
    packed = MXFP4RLConfig(mode="packed")
    words = f"{LINEAR}.* holds NaN or infinity"
    assert re.search(words, refusal(tmp_path / "plain", quantization_config=packed))
    with pytest.raises(ValueError, match=words):
        hf_mxfp4.pack(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), packed)
    with pytest.raises(CheckpointError, match=words):
        pack_checkpoint(tmp_path / "plain", tmp_path / "out", packed)
    for format in ("compressed-tensors", "bf16"):
        with pytest.raises(CheckpointError, match=words):
            export(tmp_path / "plain", tmp_path / "out", format)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_other_tensors_that_are_not_finite_are_not_converted(name, tmp_path):
    plain = tmp_path / "plain"
    make_model("llama", layers=1, dtype=torch.bfloat16).save_pretrained(plain)
    rewrite(plain / "model.safetensors", lambda tensors: tensors[name].fill_(1e5))
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity in float16.*wider dtype"):
        export(plain, tmp_path / "out", "quark", dtype="float16")  # whose largest number is 65504
    rewrite(plain / "model.safetensors", lambda tensors: tensors[name].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity in bfloat16"):
        export(plain, tmp_path / "out", "quark")
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity in bfloat16"):
        pack_checkpoint(plain, tmp_path / "out", MXFP4RLConfig(mode="packed"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", MODES)
def test_a_base_model_gets_a_head(tmp_path, mode):
    model, folder = save(tmp_path, make_model("qwen2").model, mode, auto=AutoModel)
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(folder).model)


def test_a_variant(tmp_path):
    model, _ = save(tmp_path, make_model("qwen2"), "packed")
    model.save_pretrained(tmp_path / "variants")
    model.save_pretrained(tmp_path / "variants", variant="small", max_shard_size="30KB")
    assert (tmp_path / "variants" / "model.safetensors").is_file()
    assert (tmp_path / "variants" / "model.safetensors.index.small.json").is_file()
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path / "variants", variant="small"))
    assert same_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path / "variants"))
