# SPDX-License-Identifier: Apache-2.0
"""The log that an analysis resumes from."""

import os

import pytest
import torch
from safetensors.torch import save_file

from hf_mxfp4 import lab
from hf_mxfp4.checkpoint import read_header
from hf_mxfp4.lab.errors.weights import analyze_tensor
from hf_mxfp4.numerics import QuantScheme


@pytest.fixture
def tensors(tmp_path):
    torch.manual_seed(0)
    save_file({name: torch.randn(4, 64) for name in "abc"}, tmp_path / "m.safetensors")
    return read_header(tmp_path / "m.safetensors").tensors


def result(tensor):
    return analyze_tensor(tensor, -1, [QuantScheme()])


def opened(path, *, model="m", schemes=("mxfp4+rceil",), version="1", **options):
    return lab.TensorLog(path, model, schemes, version, **options)


@pytest.fixture
def path(tensors, tmp_path):
    path = tmp_path / "out" / "progress.jsonl"
    with opened(path) as log:
        for tensor in tensors[:2]:
            log.keep(result(tensor), tensor.file)
    return path


def test_every_torn_last_line_is_dropped(path, tensors):
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in [last, *range(last + 1, len(whole), 211), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with opened(path) as log:
            assert len(log) == 1
            assert log.find(tensors[1]) is None
            log.keep(result(tensors[1]), tensors[1].file)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("line", [b"[]", b"{}", b'{"tensor": []}', b'{"tensor": "a", "sha'])
@pytest.mark.parametrize("number", [1, 2])
def test_lines_that_are_no_results_are_damage(path, number, line):
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = line
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(lab.ProgressMismatch, match="start over with --overwrite"):
        opened(path)


@pytest.mark.skipif(os.name == "nt", reason="no locks")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_log_that_is_being_written_is_refused_and_stays(path, tensors, overwrite):
    with opened(path) as log:
        with pytest.raises(lab.ProgressMismatch, match="another process is writing .*; wait for it"):
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


def test_a_log_with_another_name_elsewhere_is_continued_in_a_file_of_its_own(path, tensors):
    with opened(path) as log:
        log.keep(result(tensors[0]), tensors[0].file)
    content = path.read_bytes()
    path.with_name("other").hardlink_to(path)
    with opened(path) as log:
        n_before = len(log)
        log.keep(result(tensors[2]), tensors[2].file)
    assert path.with_name("other").read_bytes() == content
    with opened(path) as log:
        assert len(log) == n_before + 1
