# SPDX-License-Identifier: Apache-2.0
"""The log of finished tensors: what it keeps, what it forgives, and what it refuses."""

import json
import os

import pytest
import torch

from hf_mxfp4.lab import error_statistics, precision_sweep
from hf_mxfp4.lab.errors.progress import ProgressLog, ProgressMismatch
from hf_mxfp4.lab.errors.results import TensorResult
from hf_mxfp4.numerics import QuantScheme


SCHEME = QuantScheme()
IDENTITY = [100, 12345]


def result(name):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(len(name)))
    return TensorResult(
        name, "weight", (4, 64), "float32", {str(SCHEME): error_statistics(x, SCHEME)}, precision_sweep(x)
    )


def opened(path, *, model="m", schemes=("mxfp4+rceil",), version="1", **options):
    return ProgressLog(path, model, schemes, version, **options)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "out" / "progress.jsonl"
    with opened(path) as log:
        log.add(result("a"), "s1", IDENTITY)
        log.add(result("bb"), "s1", IDENTITY)
    return path


def test_results_come_back_exactly(path):
    with opened(path) as log:
        assert len(log) == 2
        assert log.find("a", "s1", IDENTITY) == result("a")
        assert log.find("bb", "s1", IDENTITY) == result("bb")
        assert log.find("c", "s1", IDENTITY) is None


def test_opening_again_changes_nothing(path):
    before = path.read_bytes()
    with opened(path):
        pass
    assert path.read_bytes() == before


def test_a_result_is_in_the_file_as_soon_as_it_is_added(path):
    with opened(path) as log:
        log.add(result("ccc"), "s2", IDENTITY)
        assert json.loads(path.read_text().splitlines()[-1])["tensor"] == "ccc"


def test_every_torn_last_line_is_dropped(path):
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in [last, *range(last + 1, len(whole), 61), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with opened(path) as log:
            assert len(log) == 1 and log.find("bb", "s1", IDENTITY) is None
            log.add(result("bb"), "s1", IDENTITY)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("kept", [0, 5])
def test_a_torn_header_starts_over(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with opened(path) as log:
        assert len(log) == 0
    with opened(path) as log:
        assert len(log) == 0
    assert len(path.read_text().splitlines()) == 1


def test_damage_in_the_middle_is_told(path):
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:-3]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ProgressMismatch, match="line 2 of .* is damaged; start over with --overwrite"):
        opened(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schemes": ("mxfp4+floor",)}, "for schemes mxfp4\\+rceil, not mxfp4\\+floor"),
        ({"schemes": ("mxfp4+rceil", "mxfp4+floor")}, "for schemes"),
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


def test_a_log_without_results_stands_for_nothing(path):
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    with opened(path, schemes=("mxfp4+floor",)) as log:
        log.add(result("a"), "s1", IDENTITY)
    assert json.loads(path.read_text().splitlines()[0])["schemes"] == ["mxfp4+floor"]


@pytest.mark.parametrize(("shard", "identity"), [("s1", [101, 12345]), ("s1", [100, 12346]), ("s2", IDENTITY)])
def test_a_changed_file_is_refused(path, shard, identity):
    with opened(path) as log:
        with pytest.raises(ProgressMismatch, match="before it changed; start over with --overwrite"):
            log.find("a", shard, identity)


@pytest.mark.skipif(os.name == "nt", reason="no locks")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_log_that_is_being_written_is_refused_and_stays(path, overwrite):
    with opened(path) as log:
        with pytest.raises(ProgressMismatch, match="another process is writing .*; wait for it, or give another --out"):
            opened(path, overwrite=overwrite)
        log.add(result("ccc"), "s1", IDENTITY)
    with opened(path) as log:
        assert len(log) == 3


def test_a_link_as_log_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        opened(tmp_path / "log", overwrite=True)
    assert (tmp_path / "victim").read_text() == "precious"
