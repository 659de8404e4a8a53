# SPDX-License-Identifier: Apache-2.0
"""The log that a long command resumes from: what it keeps, and what it refuses."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from hf_mxfp4.checkpoint import read_header
from hf_mxfp4.lab import ProgressMismatch, TensorLog
from hf_mxfp4.lab.weights import analyze_tensor
from hf_mxfp4.numerics import QuantScheme


@pytest.fixture
def tensors(tmp_path):
    torch.manual_seed(0)
    save_file({name: torch.randn(4, 64) for name in "abc"}, tmp_path / "m.safetensors")
    return read_header(tmp_path / "m.safetensors").tensors


def result(tensor):
    return analyze_tensor(tensor, -1, [QuantScheme()])


def opened(path, *, model="m", schemes=("mxfp4+rceil",), version="1", **options):
    return TensorLog(path, model, schemes, version, **options)


@pytest.fixture
def path(tensors, tmp_path):
    path = tmp_path / "out" / "progress.jsonl"
    with opened(path) as log:
        for tensor in tensors[:2]:
            log.keep(result(tensor), tensor.file)
    return path


def test_results_come_back_exactly(path, tensors):
    before = path.read_bytes()
    with opened(path) as log:
        assert [log.find(tensor) for tensor in tensors] == [*map(result, tensors[:2]), None]
        assert path.read_bytes() == before
        log.keep(result(tensors[2]), tensors[2].file)
        assert json.loads(path.read_text().splitlines()[-1])["tensor"] == "c"


def test_every_torn_last_line_is_dropped(path, tensors):
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in [last, *range(last + 1, len(whole), 211), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with opened(path) as log:
            assert len(log) == 1 and log.find(tensors[1]) is None
            log.keep(result(tensors[1]), tensors[1].file)
        assert path.read_bytes() == whole


def test_a_log_without_results_starts_over(path, tensors):
    header = path.read_bytes().split(b"\n")[0] + b"\n"
    for content in (b"", header[:5], header):
        path.write_bytes(content)
        with opened(path, schemes=("mxfp4+floor",)) as log:
            assert len(log) == 0
        assert [json.loads(line)["schemes"] for line in path.open()] == [["mxfp4+floor"]]


def test_damage_in_the_middle_is_reported(path):
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:-3]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ProgressMismatch, match="line 2 of .* is damaged; start over with --overwrite"):
        opened(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schemes": ("mxfp4+floor",)}, "for schemes mxfp4\\+rceil, not mxfp4\\+floor"),
        ({"model": "other"}, "for model m, not other"),
        ({"version": "2"}, "for hf_mxfp4 1, not 2"),
    ],
)
def test_other_settings_are_not_mixed(path, changed, message):
    before = path.read_bytes()
    with pytest.raises(ProgressMismatch, match=message):
        opened(path, **changed)
    assert path.read_bytes() == before
    with opened(path, overwrite=True, **changed) as log:
        assert len(log) == 0


def test_a_changed_file_is_refused(path, tensors):
    os.utime(tensors[0].file, ns=(1, 1))
    with opened(path) as log, pytest.raises(ProgressMismatch, match="before it changed; start over with --overwrite"):
        log.find(tensors[0])


@pytest.mark.skipif(os.name == "nt", reason="no locks")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_log_that_is_being_written_is_refused_and_stays(path, tensors, overwrite):
    with opened(path) as log:
        with pytest.raises(ProgressMismatch, match="another process is writing .*; wait for it, or give another --out"):
            opened(path, overwrite=overwrite)
        log.keep(result(tensors[2]), tensors[2].file)
    with opened(path) as log:
        assert len(log) == 3


def test_a_link_as_log_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        opened(tmp_path / "log", overwrite=True)
    assert (tmp_path / "victim").read_text() == "precious"
