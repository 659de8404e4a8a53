# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors in slices, and telling every kind of damage."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from hf_mxfp4.checkpoint.io.reader import ShardError, read_header, read_rows, slices


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "b.weight": torch.randn(10, 6).bfloat16(),
        "a.weight": torch.randn(7, 5),
        "e": torch.randn(3, 5, 4, dtype=torch.float16),
        "i": torch.arange(5),
        "s": torch.tensor(2.5),
        "z": torch.zeros(0, 4),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path, tensors


def test_every_tensor_comes_back(file):
    path, tensors = file
    found = {entry.name: entry for entry in read_header(path)}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = found[name]
        assert (entry.shape, entry.dtype, entry.nbytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
        if tensor.dim():
            assert torch.equal(read_rows(entry, 0, tensor.shape[0]), tensor)
    assert torch.equal(read_rows(found["b.weight"], 3, 7), tensors["b.weight"][3:7])


def test_slices_cover_a_tensor_in_order(file):
    path, tensors = file
    found = {entry.name: entry for entry in read_header(path)}
    parts = list(slices(found["b.weight"], max_elements=20))
    assert [part.shape[0] for part in parts] == [3, 3, 3, 1]
    assert torch.equal(torch.cat(parts), tensors["b.weight"])
    assert [part.shape[0] for part in slices(found["b.weight"], 30, multiple_of=4)] == [4, 4, 2]
    assert [part.shape[0] for part in slices(found["b.weight"], 1)] == [1] * 10
    experts = list(slices(found["e"], 12))
    assert [part.shape[0] for part in experts] == [3, 2] * 3
    assert torch.equal(torch.cat(experts).view(3, 5, 4), tensors["e"])
    assert list(slices(found["z"], 12)) == []


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DAMAGE = {
    "not-json": (b"{\xff", b"", "its header is not JSON"),
    "a-list": ([1], b"", "not a JSON object"),
    "unknown-dtype": ({"w": entry("F33")}, bytes(16), "unknown dtype 'F33'"),
    "dtype-of-another-size": ({"w": entry("F64")}, bytes(16), r"gives bytes \[0, 16\] to 32 bytes"),
    "negative-shape": ({"w": entry(shape=(2, -2))}, bytes(16), "where sizes belong"),
    "text-for-a-shape": ({"w": entry(shape=("2", 2))}, bytes(16), "where sizes belong"),
    "true-for-a-shape": ({"w": entry(shape=(True, 4))}, bytes(16), "where sizes belong"),
    "three-offsets": ({"w": entry(offsets=(0, 16, 32))}, bytes(16), "gives bytes"),
    "backwards": ({"w": entry(offsets=(16, 0))}, bytes(16), "gives bytes"),
    "missing-key": ({"w": {"dtype": "F32", "shape": [4]}}, bytes(16), "not exactly dtype, shape and data_offsets"),
    "overlap": ({"v": entry(), "w": entry(offsets=(8, 24))}, bytes(24), "overlap others or leave a hole"),
    "hole": ({"v": entry(), "w": entry(offsets=(20, 36))}, bytes(36), "overlap others or leave a hole"),
    "starts-late": ({"w": entry(offsets=(4, 20))}, bytes(20), "overlap others or leave a hole"),
    "truncated": ({"w": entry()}, bytes(15), "is truncated: its tensors end at byte"),
    "longer": ({"w": entry()}, bytes(17), "1 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path, case):
    header, data, message = DAMAGE[case]
    path = write(tmp_path / "broken.safetensors", header, data)
    with pytest.raises(ShardError, match=message) as error:
        read_header(path)
    assert str(error.value).startswith("broken.safetensors is ")


@pytest.mark.parametrize("contents", [b"", b"\x10\0\0", struct.pack("<Q", 10**6) + b"{}", b"\xff" * 64])
def test_no_header(tmp_path, contents):
    path = tmp_path / "x.safetensors"
    path.write_bytes(contents)
    with pytest.raises(ShardError, match="x.safetensors is truncated or not a safetensors file"):
        read_header(path)


def test_missing_file(tmp_path):
    with pytest.raises(ShardError, match="'gone.safetensors' cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.large)])
def test_every_flipped_bit_of_a_header_is_found_or_harmless(tmp_path, step):
    """No flip may make another tensor readable under a wrong size; those in names and between like dtypes remain. Every
    third bit, or every one."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.ones(2, 2, dtype=torch.float16)}, path)
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    clean = {(entry.shape, entry.dtype.itemsize) for entry in read_header(path)}
    refused = 0
    for i in range(0, 8 * (8 + length), step):
        broken = bytearray(whole)
        broken[i // 8] ^= 1 << (i % 8)
        path.write_bytes(broken)
        try:
            found = read_header(path)
        except ShardError:
            refused += 1
            continue
        # A flipped quote can only hide tensors in the free metadata, never at the price of unclaimed bytes.
        for entry in found:
            assert (entry.shape, entry.dtype.itemsize) in clean or entry.nbytes == 0
    assert refused > 4 * length / step


def test_a_file_cut_after_its_header_was_read(file):
    path, _ = file
    last = [entry for entry in read_header(path) if entry.nbytes and entry.shape][-1]
    path.write_bytes(path.read_bytes()[: last.offset + 2])
    with pytest.raises(ShardError, match="ended inside"):
        read_rows(last, 0, last.shape[0])
