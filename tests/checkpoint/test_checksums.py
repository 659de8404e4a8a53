# SPDX-License-Identifier: Apache-2.0
"""Checksums of a checkpoint's files: who writes them, and what finds a difference. The oracle hashes with xxhash."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from export_files import header_and_data, save_plain
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import export, import_checkpoint, pack_checkpoint, verify_folder
from hf_mxfp4.checkpoint.io.index import check_local_index
from hf_mxfp4.checkpoint.io.manifest import MANIFEST, record_of
from hf_mxfp4.checkpoint.io.reader import ShardError, load_header, read_header
from hf_mxfp4.checkpoint.verify import add_to_folder


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


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / MANIFEST).read_text())["files"]


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def flip(file: Path, name: str) -> None:
    """Flip the last bit of a tensor."""
    (stored,) = [tensor for tensor in read_header(file) if tensor.name == name]
    content = bytearray(file.read_bytes())
    content[stored.offset + stored.nbytes - 1] ^= 128
    file.write_bytes(content)


def where(folder: Path) -> list[str]:
    return [problem.where for problem in verify_folder(folder).problems]


def test_whatever_writes_weights_records_them(saved, tmp_path):
    pack_checkpoint(saved["master"], tmp_path / "packed", max_shard_size="10KB")
    export(saved["plain"], tmp_path / "exported", "compressed-tensors")
    export(saved["master"], tmp_path / "bf16", "bf16")
    import_checkpoint(tmp_path / "exported", tmp_path / "imported")
    folders = [saved["master"], saved["packed"], *(tmp_path / n for n in ("packed", "exported", "bf16", "imported"))]
    for folder in folders:
        files = [*files_in(folder), *folder.glob("*.index.json")]
        expected = {
            file.name: {"size": file.stat().st_size, "xxh3_128": xxh3_128_hexdigest(file.read_bytes())}
            for file in files
        }
        assert manifest_of(folder) == expected and not where(folder)


def test_master_weights_are_the_files_of_the_plain_model(saved, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(saved["plain"])
    plain.save_pretrained(tmp_path / "plain", max_shard_size="15KB")
    for file, other in zip(files_in(tmp_path / "plain"), files_in(saved["master"]), strict=True):
        assert (file.read_bytes() == other.read_bytes()) is True
    assert not (tmp_path / "plain" / MANIFEST).exists()


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


def test_adapters_have_none(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved["packed"])
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def test_a_second_save_keeps_records_of_other_files(copy):
    folder = copy("packed")
    (folder / "extra.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    add_to_folder(folder)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="10KB")
    assert "model.safetensors" not in manifest_of(folder) and "extra.safetensors" in manifest_of(folder)
    assert len(manifest_of(folder)) > 3 and not where(folder)


@pytest.mark.parametrize("name", ["master", "packed"])
def test_loading_reads_no_checksums(copy, name):
    folder = copy(name)
    flip(files_in(folder)[-1], "model.norm.weight")
    AutoModelForCausalLM.from_pretrained(folder)
    assert where(folder) == [files_in(folder)[-1].name]


@pytest.mark.parametrize("what", ["pack", "export", "import"])
def test_a_damaged_source_is_not_converted(copy, tmp_path, what):
    if what == "import":
        export(copy("plain"), tmp_path / "source", "compressed-tensors")
    else:
        copy("master").rename(tmp_path / "source")
    file = files_in(tmp_path / "source")[-1]
    flip(file, "model.norm.weight")
    convert = {
        "pack": lambda: pack_checkpoint(tmp_path / "source", tmp_path / "out"),
        "export": lambda: export(tmp_path / "source", tmp_path / "out", "bf16"),
        "import": lambda: import_checkpoint(tmp_path / "source", tmp_path / "out"),
    }
    with pytest.raises(ShardError, match=rf"^{file.name} is damaged: its checksum is"):
        convert[what]()
    assert not (tmp_path / "out").exists()


# ---- files from before manifests -----------------------------------------------------------------------------------


def as_before(folder: Path) -> None:
    """Give the files of a folder the checksums in their headers that older versions wrote, instead of a manifest."""
    for file in files_in(folder):
        tensors, metadata = load_file(file), {**metadata_of(file)}
        hashes = {
            name: xxh3_64_hexdigest(t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()
        }
        metadata["mxfp4_rl_checksums"] = json.dumps(hashes)
        contents = {n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()}
        text = json.dumps({"metadata": metadata, "tensors": contents}, sort_keys=True, separators=(",", ":"))
        metadata["mxfp4_rl_header_checksum"] = xxh3_64_hexdigest(text.encode())
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, metadata=metadata)
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize("name", ["master", "packed"])
def test_older_checkpoints_load_and_are_verified(copy, name):
    folder = copy(name)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    as_before(folder)
    after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    found = verify_folder(folder)
    assert not found.problems and found.checked == [file.name for file in files_in(folder)]
    last = files_in(folder)[-1]
    flip(last, "model.norm.weight")
    assert [problem.reason for problem in verify_folder(folder).problems] == [
        f"{last.name} is damaged: the data of model.norm.weight does not have its checksum"
    ]
    assert add_to_folder(folder) == (["model.safetensors.index.json"] if name == "master" else [])


@pytest.mark.parametrize("change", ["other", "gone", "text", "entry"])
def test_the_header_of_an_older_file_that_is_not_the_one_that_was_written(copy, change):
    folder = copy("packed")
    as_before(folder)
    (file,) = files_in(folder)
    tensors, metadata = load_file(file), metadata_of(file)
    if change == "other":
        metadata["another"] = "entry"
    elif change == "gone":
        metadata.pop("mxfp4_rl_header_checksum")
    else:
        metadata["mxfp4_rl_checksums"] = "{" if change == "text" else "{}"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, metadata=metadata)
    assert where(folder) == ["model.safetensors"]


# ---- verify --add --------------------------------------------------------------------------------------------------


def test_adding_leaves_the_files_as_they_are(copy):
    folder = copy("plain")
    before, done = header_and_data(folder / "model.safetensors"), []
    assert add_to_folder(folder, lambda count, name: done.append(count)) == ["model.safetensors"]
    assert sum(done) == (folder / "model.safetensors").stat().st_size
    assert header_and_data(folder / "model.safetensors") == before and not where(folder)
    assert add_to_folder(folder) == []


def test_what_is_recorded_is_not_replaced(copy):
    folder = copy("packed")
    (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    flip(folder / "model.safetensors", "lm_head.weight")
    assert add_to_folder(folder) == ["more.safetensors"] and where(folder) == ["model.safetensors"]


def test_a_file_that_changes_meanwhile_is_not_recorded(copy):
    folder = copy("plain")

    def write(count, name):
        with open(folder / "model.safetensors", "ab") as file:
            file.write(b"more")

    with pytest.raises(ShardError, match=r"model.safetensors was written to while it was read"):
        record_of(folder / "model.safetensors", write)


def test_a_link_as_draft_or_manifest_is_not_followed(copy, tmp_path):
    folder, victim = copy("plain"), tmp_path / "victim"
    victim.write_text("precious")
    for name in ("model.safetensors.part", f"{MANIFEST}.part"):
        (folder / name).symlink_to(victim)
    add_to_folder(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).symlink_to(tmp_path / "nowhere")
    add_to_folder(folder)
    assert victim.read_text() == "precious" and not (tmp_path / "nowhere").exists() and not where(folder)


ADDING = """
import sys
from pathlib import Path
from hf_mxfp4.checkpoint.verify import add_to_folder
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
for i in range(rounds):
    print(flush=True)  # ready
    sys.stdin.readline()
    add_to_folder(folder)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_processes_that_add_to_one_folder_at_a_time(copy):
    """All data is as before, and what is recorded is right, in every round."""
    folder, rounds = copy("master"), 40
    before = {file.name: file.read_bytes() for file in files_in(folder)}
    expected = manifest_of(folder)
    root = Path(hf_mxfp4.__file__).parents[1]
    command = [sys.executable, "-c", ADDING, str(folder), str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        one.stdout.readline(), other.stdout.readline()
        for _ in range(rounds):
            (folder / MANIFEST).unlink()
            for process in (one, other):
                process.stdin.write("\n")
                process.stdin.flush()
            one.stdout.readline(), other.stdout.readline()
            assert manifest_of(folder) == expected
    assert (one.returncode, other.returncode) == (0, 0)
    assert all((folder / name).read_bytes() == content for name, content in before.items())
    assert not list(folder.glob(".draft-*"))


def test_saves_into_one_folder_take_turns(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved["packed"])
    failures = []

    def save():
        try:
            model.save_pretrained(tmp_path, max_shard_size="10KB")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=save) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not where(tmp_path) and not list(tmp_path.glob(".saving-*"))


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
