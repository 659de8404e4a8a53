# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: every one gives an error that names the file, and the tensor where there is one; none a wrong
model. Cases are generated from seeds; what a change of header bytes leaves readable must load as the very same
model."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2ForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import verify_folder


IDS = torch.arange(8)[None]
KINDS = ["qat", "qat-sharded", "packed", "packed-sharded"]
LINEAR = "model.layers.0.mlp.up_proj"


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


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder)


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises((ValueError, OSError)) as caught:
        load(folder)
    for word in words:
        assert word in str(caught.value)


def rewrite(file: Path, change) -> None:
    """Apply ``change`` to the tensors of a file and write it again as a valid file with the same metadata, but for the
    checksums."""
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={k: v for k, v in header["__metadata__"].items() if "checksum" not in k})


def seeds(few: int, many: int) -> list:
    """So many in every run, and in the long one."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.large) for seed in range(few, many))]


def drawn(kind: str, seed: int, folder: Path) -> tuple[random.Random, Path]:
    rng = random.Random(f"{kind} {seed}")
    return rng, rng.choice(shards(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_they_load(originals, kind):
    folder, expected = originals[kind]
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize("seed", seeds(3, 10))
@pytest.mark.parametrize("kind", KINDS)
def test_truncated(damaged, kind, seed):
    folder = damaged(kind)
    rng, file = drawn(kind, seed, folder)
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content)) if seed else 0])
    assert_refused(folder, file.name)


@pytest.mark.parametrize("seed", seeds(12, 45))
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bit_in_a_header(originals, damaged, kind, seed):
    folder = damaged(kind)
    rng, file = drawn(kind, seed, folder)
    content = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    content[rng.randrange(length)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    try:
        model = load(folder)
    except (ValueError, OSError) as error:
        assert file.name in str(error)
    else:
        assert torch.equal(logits(model), originals[kind][1])


@pytest.mark.parametrize("kind", ["qat-sharded", "packed-sharded"])
@pytest.mark.parametrize("number", range(3))
def test_missing_shard(damaged, kind, number):
    folder = damaged(kind)
    file = shards(folder)[number]
    file.unlink()
    assert_refused(folder, file.name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", ["model.layers.1.mlp.up_proj.weight", f"{LINEAR}.zero_point", "model.norm.bias"])
def test_unexpected_tensor(damaged, kind, extra):
    folder = damaged(kind)
    file = shards(folder)[0]
    rewrite(file, lambda tensors: tensors.update({extra: torch.zeros(3)}))
    assert_refused(folder, file.name, extra)


SHAPES = [lambda t: t[:-1], lambda t: torch.cat([t, t]), lambda t: t[None], lambda t: t.flatten()[:1]]
TO_FLOAT, TO_INT = [torch.float32, torch.bfloat16, torch.int8], [torch.uint8, torch.int32, torch.bool]


@pytest.mark.parametrize("seed", seeds(4, 10))
@pytest.mark.parametrize("what", ["missing", "shape", "dtype"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_missing_or_another(damaged, kind, what, seed):
    folder = damaged(kind)
    rng, file = drawn(kind, seed, folder)
    name = rng.choice(sorted(load_file(file)))

    def change(tensors):
        tensor = tensors.pop(name)
        if what == "shape":
            tensors[name] = SHAPES[seed % 4](tensor).contiguous()
        elif what == "dtype":
            tensors[name] = tensor.to((TO_INT if tensor.is_floating_point() else TO_FLOAT)[seed % 3])

    rewrite(file, change)
    if what == "missing":  # of a packed layer without codes, the scales are found without an owner
        assert_refused(folder, "safetensors", name.rpartition(".")[0])
    else:
        assert_refused(folder, file.name, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "edit, word",
    [
        ({"num_hidden_layers": 2}, "model.layers.1"),
        ({"num_hidden_layers": 0}, ""),
        ({"hidden_size": 64}, "model."),
        ({"intermediate_size": 32}, "model.layers.0.mlp"),
        ({"vocab_size": 31}, "32"),
        ({"num_key_value_heads": 2}, "self_attn"),
    ],
)
def test_config_that_describes_another_model(damaged, kind, edit, word):
    folder = damaged(kind)
    config = json.loads((folder / "config.json").read_text())
    config |= edit
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(folder, word)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_missing_tensor_below_another_head(damaged, kind, auto):
    folder = damaged(kind)
    file = next(file for file in shards(folder) if "model.norm.weight" in load_file(file))
    rewrite(file, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"safetensors.*norm\.weight"):
        auto.from_pretrained(folder)


def save_beside_experts(folder: Path, mode: str, family: str) -> None:
    """A quantized checkpoint of which the experts are left alone."""
    make_model(family, hidden=32, intermediate=32).save_pretrained(folder / "base")
    config = MXFP4RLConfig(modules_to_not_convert=["experts"])
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config)
    (hf_mxfp4.pack(model) if mode == "packed" else model).save_pretrained(folder / "model")


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_missing_tensor_beside_experts(tmp_path, mode, family):
    save_beside_experts(tmp_path, mode, family)
    (file,) = shards(tmp_path / "model")
    whole = file.read_bytes()
    an_expert = next(name for name in sorted(load_file(file)) if ".experts.1." in name)
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight", an_expert):
        file.write_bytes(whole)
        rewrite(file, lambda tensors, name=name: tensors.pop(name))
        assert_refused(tmp_path / "model", name)


def test_fewer_experts_than_the_files_hold(tmp_path):
    save_beside_experts(tmp_path, "qat", "qwen3_moe")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (key,) = {"num_experts", "num_local_experts"} & config.keys()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, key: config[key] - 1}))
    assert_refused(tmp_path / "model", "model.safetensors")


def edit_scheme(folder: Path, **edit) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= edit
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_version(damaged, kind):
    folder = damaged(kind)
    for version in (0, 2, 99, "1", None, 1.0):
        edit_scheme(folder, format_version=version)
        assert_refused(folder, "format_version")


@pytest.mark.parametrize("kind", KINDS)
def test_config_of_the_other_mode(damaged, kind):
    folder = damaged(kind)
    edit_scheme(folder, mode="packed" if kind.startswith("qat") else "qat")
    assert_refused(folder, "safetensors", "model.layers.0")


@pytest.mark.parametrize("kind", ["packed", "packed-sharded"])
@pytest.mark.parametrize(
    "edit",
    [
        {"macro_block": None, "macro_search": "hybrid"},
        {"macro_block": 32, "macro_search": "hybrid"},
        {"macro_search": "static"},
        {"outlier_fallback": None},
        {"outlier_fallback": 0.25},
        {"outlier_fallback_operands": "activations"},
        {"modules_to_not_convert": ["mlp.up_proj"]},
    ],
)
def test_config_that_gives_the_bytes_another_meaning(damaged, kind, edit):
    folder = damaged(kind)
    edit_scheme(folder, **edit)
    assert_refused(folder, "safetensors", "config.json")


@pytest.mark.parametrize("kind", ["packed", "packed-sharded"])
@pytest.mark.parametrize("edit", [{"preset": "w4a16"}, {"scale_rule": "even"}, {"backend": "eager"}])
def test_config_that_leaves_their_meaning_loads(damaged, kind, edit):
    folder = damaged(kind)
    edit_scheme(folder, **edit)
    assert load(folder).quantization_report.n_quantized == 7


@pytest.mark.parametrize("kind", KINDS)
def test_unreadable_config(damaged, kind):
    folder = damaged(kind)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])
    assert_refused(folder, "config.json")


@pytest.mark.parametrize("kind", ["qat-sharded", "packed-sharded"])
@pytest.mark.parametrize("what", ["moved", "dropped", "added"])
def test_index_that_does_not_fit(originals, damaged, kind, what):
    """Every file that an index names is read whole, so the model is the same; `verify` reports the index."""
    folder = damaged(kind)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    name = sorted(places)[3]
    if what == "moved":
        places[name] = next(file.name for file in shards(folder) if file.name != places[name])
    elif what == "dropped":
        del places[name]
    else:
        name = "model.layers.9.weight"
        places[name] = shards(folder)[0].name
    path.write_text(json.dumps(index))
    assert torch.equal(logits(load(folder)), originals[kind][1])
    assert any(name in problem.reason for problem in verify_folder(folder).problems)


@pytest.mark.parametrize("kind", ["qat", "packed"])
def test_what_an_error_about_names_advises_works(damaged, monkeypatch, kind):
    folder = damaged(kind)
    (file,) = shards(folder)
    rewrite(file, lambda tensors: tensors.update({"extra.weight": tensors.pop("model.norm.weight")}))
    with pytest.raises(ValueError, match="no tensor model.norm.weight .*Qwen2ForCausalLM._keys_to_ignore_on_load_miss"):
        load(folder)
    monkeypatch.setattr(Qwen2ForCausalLM, "_keys_to_ignore_on_load_missing", [r"^model\.norm\."])
    with pytest.raises(ValueError, match="tensor extra.weight .*Qwen2ForCausalLM._keys_to_ignore_on_load_unexpected"):
        load(folder)
    monkeypatch.setattr(Qwen2ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^extra\."])
    assert logits(load(folder)).isfinite().all()


def test_shards_of_two_schemes(originals, damaged, tmp_path):
    folder = damaged("packed-sharded")
    file = shards(folder)[0]
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    record = json.loads(header["__metadata__"]["mxfp4_rl"])
    record["meaning"]["outlier_fallback"] = 0.25
    save_file(load_file(file), file, metadata={"format": "pt", "mxfp4_rl": json.dumps(record)})
    assert_refused(folder, file.name, "not written together")


@pytest.mark.parametrize("kind", ["qat", "packed"])
def test_pickled_weights_are_refused_unread(damaged, monkeypatch, kind):
    folder = damaged(kind)
    file = shards(folder)[0]
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    monkeypatch.setattr(torch, "load", None)
    assert_refused(folder, "pytorch_model.bin", "safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_unpickled_and_no_code_is_run(originals, monkeypatch, kind):
    monkeypatch.setattr(torch, "load", None)
    folder, expected = originals[kind]
    assert not list(folder.glob("*.py")) + list(folder.glob("*.bin"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)), expected)
