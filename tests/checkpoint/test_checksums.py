# SPDX-License-Identifier: Apache-2.0
"""Checksums in the files of checkpoints: who writes them, what they are of, and what loading does with them. The oracle
reads tensors with safetensors and hashes them with xxhash."""

import json
import logging
import threading
from pathlib import Path

import pytest
import torch
from export_files import header_and_data, save_plain
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_utils
from xxhash import xxh3_64_hexdigest

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import export, import_checkpoint, pack_checkpoint
from hf_mxfp4.checkpoint.io import integrity, saved_files
from hf_mxfp4.checkpoint.io.checksums import CHECKSUMS, HEADER_CHECKSUM, header_checksum, tensor_checksum
from hf_mxfp4.checkpoint.io.index import check_local_index
from hf_mxfp4.checkpoint.io.integrity import FileChecksums, add_checksums, check_data, find_damage
from hf_mxfp4.checkpoint.io.reader import ShardError, load_header, read_file_header, read_header
from hf_mxfp4.checkpoint.io.writer import ShardWriter, TensorSpec


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A plain checkpoint, one of master weights in several files, and one of packed weights."""
    base = tmp_path_factory.mktemp("checksums")
    save_plain(base / "plain", layers=1, hidden=32, intermediate=64)
    model = AutoModelForCausalLM.from_pretrained(base / "plain", quantization_config=MXFP4RLConfig())
    model.save_pretrained(base / "master", max_shard_size="15KB")
    assert len(files_in(base / "master")) > 1
    hf_mxfp4.pack(model).save_pretrained(base / "packed")
    return {name: base / name for name in ("plain", "master", "packed")}


def files_in(folder: Path) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def expected_checksums(file: Path) -> dict[str, str]:
    tensors = load_file(file)
    return {name: xxh3_64_hexdigest(t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


def change_metadata(file: Path, change) -> None:
    metadata, tensors = metadata_of(file), {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(metadata)
    save_file(tensors, file, metadata=metadata)


def drop_checksums(file: Path) -> None:
    change_metadata(file, lambda metadata: [metadata.pop(key) for key in (CHECKSUMS, HEADER_CHECKSUM)])


def flip(file: Path, name: str) -> None:
    """Flip the last bit of a tensor."""
    (stored,) = [tensor for tensor in read_header(file) if tensor.name == name]
    content = bytearray(file.read_bytes())
    content[stored.offset + stored.nbytes - 1] ^= 128
    file.write_bytes(content)


def test_what_a_checksum_is():
    assert tensor_checksum(torch.zeros(0, 3)) == "2d06800538d394c2"  # XXH3-64 of nothing
    assert tensor_checksum(torch.tensor(2.5).double()) == xxh3_64_hexdigest(b"\0\0\0\0\0\0\x04\x40")
    assert tensor_checksum(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t()) == xxh3_64_hexdigest(b"\1\3\2\4")
    contents = {"b": (torch.bfloat16, (2, 3)), "a": (torch.uint8, ())}
    text = b'{"metadata":{"k":"v"},"tensors":{"a":["uint8",[]],"b":["bfloat16",[2,3]]}}'
    assert header_checksum(contents, {HEADER_CHECKSUM: "any", "k": "v"}) == xxh3_64_hexdigest(text)


def test_whatever_writes_files_writes_checksums(saved, tmp_path):
    pack_checkpoint(saved["master"], tmp_path / "packed", max_shard_size="10KB")
    export(saved["plain"], tmp_path / "exported", "compressed-tensors")
    export(saved["master"], tmp_path / "bf16", "bf16")
    import_checkpoint(tmp_path / "exported", tmp_path / "imported")
    folders = [saved["master"], saved["packed"], *(tmp_path / n for n in ("packed", "exported", "bf16", "imported"))]
    for folder in folders:
        for file in files_in(folder):
            assert json.loads(metadata_of(file)[CHECKSUMS]) == expected_checksums(file), file
        assert check_data(files_in(folder)) == sum(len(load_file(file)) for file in files_in(folder)) > 14


def test_master_weights_are_the_plain_tensors_in_the_plain_layout(saved, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(saved["plain"])
    plain.save_pretrained(tmp_path / "plain", max_shard_size="15KB")
    for file, other in zip(files_in(tmp_path / "plain"), files_in(saved["master"]), strict=True):
        (header, data), (other_header, other_data) = header_and_data(file), header_and_data(other)
        assert json.loads(header)[1] == json.loads(other_header)[1] and (data == other_data) is True
        assert metadata_of(file) == {"format": "pt"}  # what transformers writes for others has none
        assert metadata_of(other).keys() == {"format", CHECKSUMS, HEADER_CHECKSUM}


@pytest.mark.parametrize("name", ["master", "packed"])
def test_the_same_model_gives_the_same_bytes(saved, tmp_path, name):
    model = AutoModelForCausalLM.from_pretrained(saved[name])
    for folder in ("one", "two"):
        model.save_pretrained(tmp_path / folder, max_shard_size="10KB")
    files = files_in(tmp_path / "one")
    for file, other in zip(files, files_in(tmp_path / "two"), strict=True):
        assert (file.read_bytes() == other.read_bytes()) is True, file.name
        assert [*load_header(file)[0]["__metadata__"]] == sorted(metadata_of(file))
    assert len(files) > 1


def test_a_transformers_that_writes_files_in_another_way(saved, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(saved["packed"])
    model.save_pretrained(tmp_path / "one", max_shard_size="10KB")
    monkeypatch.setattr(modeling_utils, "safe_save_file", save_file)
    monkeypatch.setattr(saved_files, "_wrap_writing", lambda: None)
    model.save_pretrained(tmp_path / "two", max_shard_size="10KB")
    assert len(files_in(tmp_path / "one")) > 1
    for file, other in zip(files_in(tmp_path / "one"), files_in(tmp_path / "two"), strict=True):
        assert header_and_data(file) == header_and_data(other)


def test_saves_in_other_threads_and_of_adapters_stay_as_they_are(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved["packed"])
    with saved_files.checksums_in(tmp_path):
        thread = threading.Thread(target=lambda: modeling_utils.safe_save_file({"x": torch.ones(1)}, tmp_path / "x.st"))
        thread.start()
        thread.join()
        modeling_utils.safe_save_file({"x": torch.ones(1)}, tmp_path / "y.st")
    assert metadata_of(tmp_path / "x.st") is None and CHECKSUMS in metadata_of(tmp_path / "y.st")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert CHECKSUMS not in metadata_of(tmp_path / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("name", ["master", "packed"])
def test_a_changed_tensor_is_named(copy, name):
    folder = copy(name)
    file = files_in(folder)[-1]
    flip(file, "model.norm.weight")
    what = (
        rf"{file.name} is damaged: the data of model\.norm\.weight has the checksum [0-9a-f]{{16}}, [0-9a-f]{{16}} was"
    )
    with pytest.raises(ShardError, match=what):
        AutoModelForCausalLM.from_pretrained(folder)


def test_the_first_of_several_is_told_and_all_are_found(copy):
    (file,) = files_in(copy("packed"))
    names = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight_scale", "lm_head.weight"]
    for name in names:
        flip(file, name)
    order = [tensor.name for tensor in read_header(file) if tensor.name in names]
    assert [damage.tensor for damage in find_damage([FileChecksums(read_file_header(file))])] == order
    with pytest.raises(ShardError, match=f"the data of {order[0]}"):
        check_data([file])


def test_portions_of_any_size_give_the_same(copy, monkeypatch):
    (file,) = files_in(copy("packed"))
    monkeypatch.setattr(integrity, "_READ", 100)
    monkeypatch.setattr(integrity, "_MAPPED", 4096)
    monkeypatch.setattr(integrity, "_GROUP", 1000)
    assert not list(find_damage([FileChecksums(read_file_header(file))])) and check_data([file], mapped=True) == len(
        load_file(file)
    )
    flip(file, "model.embed_tokens.weight")
    assert [damage.tensor for damage in find_damage([FileChecksums(read_file_header(file))])] == [
        "model.embed_tokens.weight"
    ]
    with pytest.raises(ShardError, match="the data of model.embed_tokens.weight"):
        check_data([file], mapped=True)


def test_tensors_without_elements(tmp_path):
    tensors = {"a": torch.zeros(0, 3), "b": torch.ones(2), "c": torch.zeros(0)}
    with ShardWriter(tmp_path, {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    assert check_data([tmp_path / "model.safetensors"]) == 3
    save_file({}, tmp_path / "none.safetensors")
    assert add_checksums(tmp_path / "none.safetensors") == 0 == check_data([tmp_path / "none.safetensors"])


def edit_checksums(**changes):
    def change(metadata):
        metadata[CHECKSUMS] = json.dumps({**json.loads(metadata[CHECKSUMS]), **changes})

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: metadata.update({CHECKSUMS: "{"}),
        lambda metadata: metadata.update({CHECKSUMS: "[]"}),
        lambda metadata: metadata.update({HEADER_CHECKSUM: "0" * 16}),
        lambda metadata: metadata.update({"mxfp4_rl": metadata["mxfp4_rl"].replace('"weight_sqnr_db": ', "1")}),
        lambda metadata: metadata.update({"another": "entry"}),
        lambda metadata: metadata.pop(HEADER_CHECKSUM),
        lambda metadata: metadata.pop(CHECKSUMS),
        edit_checksums(**{"model.norm.weight": "0" * 16}),
    ],
)
def test_a_header_that_is_not_the_one_that_was_written(copy, change):
    folder = copy("packed")
    change_metadata(folder / "model.safetensors", change)
    with pytest.raises(ValueError, match=r"^model.safetensors is damaged: "):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("entry", [None, 5])
def test_a_tensor_without_a_checksum_among_others(copy, entry):
    (file,) = files_in(copy("packed"))
    tensors = load_file(file)

    def change(metadata):
        edit_checksums(**{"model.norm.weight": entry})(metadata)
        metadata[HEADER_CHECKSUM] = header_checksum({n: (t.dtype, t.shape) for n, t in tensors.items()}, metadata)

    change_metadata(file, change)
    with pytest.raises(ShardError, match=r"its header has no checksum of model.norm.weight \(1 lack one\)"):
        check_data([file])


def logged(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hf_mxfp4"]


@pytest.mark.parametrize("name", ["master", "packed"])
def test_files_without_checksums_load_as_ever(copy, caplog, name):
    folder = copy(name)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for file in files_in(folder):
        drop_checksums(file)
    with caplog.at_level(logging.INFO, "hf_mxfp4"):
        after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert [line for line in logged(caplog) if "checksums" in line or "checked" in line] == [
        "the files carry no checksums: their data are not checked (hf-mxfp4 verify --add adds them)"
    ]


def test_a_plain_checkpoint_that_is_quantized_has_nothing_to_say(copy, caplog):
    with caplog.at_level(logging.INFO, "hf_mxfp4"):
        AutoModelForCausalLM.from_pretrained(copy("plain"), quantization_config=MXFP4RLConfig(mode="packed"))
    assert not [line for line in logged(caplog) if "checksums" in line or "checked" in line]


def test_one_file_without_among_others_is_warned_of(copy, caplog):
    folder = copy("master")
    drop_checksums(files_in(folder)[1])
    with caplog.at_level(logging.INFO, "hf_mxfp4"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert [r.levelname for r in caplog.records if files_in(folder)[1].name in r.getMessage()] == ["WARNING"]


def test_the_environment_switches_it_off(copy, caplog, monkeypatch):
    folder = copy("packed")
    flip(folder / "model.safetensors", "lm_head.weight")
    monkeypatch.setenv("HF_MXFP4_VERIFY", "0")
    with caplog.at_level(logging.INFO, "hf_mxfp4"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert "HF_MXFP4_VERIFY=0: the data of the checkpoint are not checked" in logged(caplog)
    monkeypatch.setenv("HF_MXFP4_VERIFY", "off")
    with pytest.raises(ValueError, match="HF_MXFP4_VERIFY='off' must be 1, .* or 0"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("what", ["pack", "export", "import", "quantize"])
def test_a_damaged_source_is_not_converted(copy, tmp_path, what):
    if what == "import":
        export(copy("plain"), tmp_path / "source", "compressed-tensors")
    elif what == "quantize":
        export(copy("master"), tmp_path / "source", "bf16")
    else:
        copy("master").rename(tmp_path / "source")
    file = files_in(tmp_path / "source")[-1]
    flip(file, "model.norm.weight")
    convert = {
        "pack": lambda: pack_checkpoint(tmp_path / "source", tmp_path / "out"),
        "export": lambda: export(tmp_path / "source", tmp_path / "out", "bf16"),
        "import": lambda: import_checkpoint(tmp_path / "source", tmp_path / "out"),
        "quantize": lambda: AutoModelForCausalLM.from_pretrained(
            tmp_path / "source", quantization_config=MXFP4RLConfig(mode="packed")
        ),
    }
    with pytest.raises(ShardError, match=rf"^{file.name} is damaged: the data of model.norm.weight"):
        convert[what]()
    assert not (tmp_path / "out").exists()


def test_adding_keeps_the_tensors_and_the_rest_of_the_header(copy):
    folder = copy("packed")
    file, original = folder / "model.safetensors", header_and_data(folder / "model.safetensors")
    drop_checksums(file)
    linked = file.rename(folder / "elsewhere")
    file.symlink_to(linked)
    done = []
    assert add_checksums(file, lambda count, name: done.append(count)) == len(load_file(linked)) > 14
    assert header_and_data(file) == original and sum(done) == len(original[1])
    assert not file.is_symlink() and CHECKSUMS not in metadata_of(linked)
    with pytest.raises(ValueError, match="model.safetensors carries checksums already"):
        add_checksums(file)


def test_adding_that_fails_leaves_the_file(copy, monkeypatch):
    file = copy("plain") / "model.safetensors"
    before = file.read_bytes()
    monkeypatch.setattr(integrity, "sync_to_disk", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        add_checksums(file)
    assert file.read_bytes() == before and [path.name for path in file.parent.glob("*.part")] == []


def test_the_index_of_a_repository_is_looked_at_where_it_is_cached(tmp_path, monkeypatch):
    asked = []

    def cached(repo, name, revision):
        asked.append((repo, name, revision))
        return str(tmp_path / name) if (tmp_path / name).is_file() else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    index = tmp_path / "model.safetensors.index.json"
    check_local_index("me/model", "abc")  # not there yet
    index.write_text('{"metadata": {}, "weight_map": {"x": "model-00001-of-00001.safetensors"}}')
    check_local_index("me/model", "abc")
    index.write_text('{"metadata": {}, "weight_map": {"x": "model-00001-of-00001.safetensors"}')
    with pytest.raises(ShardError, match="^model.safetensors.index.json is damaged: it is not JSON"):
        check_local_index("me/model", "abc")
    (tmp_path / "model.safetensors").touch()  # which is what transformers prefers
    check_local_index("me/model", "abc")
    assert asked[:2] == [("me/model", name, "abc") for name in ("model.safetensors", index.name)]
    check_local_index("", None)
    check_local_index(None)
