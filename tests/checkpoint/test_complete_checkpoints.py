# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint folders count as whole."""

import json

import pytest

from hf_mxfp4._logging import get_logger
from hf_mxfp4.checkpoint import (
    MANIFEST,
    checkpoint_step,
    invalidate,
    last_complete_checkpoint,
    why_incomplete,
    write_whole_manifest,
)


@pytest.fixture
def make(tmp_path):
    def checkpoint(step, manifest=True):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "global_step").mkdir(parents=True)
        (folder / "optimizer.pt").write_bytes(b"weights")
        (folder / "global_step" / "shard.pt").write_bytes(b"shard")
        (folder / "README.md").write_text("card")
        if manifest:
            assert write_whole_manifest(folder) == 2
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return folder

    return checkpoint


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-7", 7),
        ("run/checkpoint-12", 12),
        ("checkpoint-7-best", None),
        ("policy", None),
        ("checkpoint-", None),
    ],
)
def test_the_step_is_in_the_name(name, step):
    assert checkpoint_step(name) == step


def test_a_whole_one_is_taken_and_its_card_may_change(make):
    folder = make(3)
    assert why_incomplete(folder) is None
    (folder / "README.md").write_text("edited by hand")
    (folder / "notes.txt").write_text("added later")
    assert why_incomplete(folder) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "trainer_state.json").unlink(), "it has no trainer_state.json: saving it was not finished"),
        (lambda f: (f / "trainer_state.json").write_text('{"global_st'), "its trainer_state.json is cut short"),
        (lambda f: (f / "trainer_state.json").write_text(""), "its trainer_state.json is cut short"),
        (lambda f: (f / "optimizer.pt").write_bytes(b"w"), "optimizer.pt: it has 1 bytes instead of 7"),
        (lambda f: (f / "global_step" / "shard.pt").unlink(), "global_step/shard.pt: it is missing"),
        (lambda f: (f / "mxfp4_manifest.json").write_text("{"), "mxfp4_manifest.json is damaged"),
        (lambda f: (f / "mxfp4_manifest.json").write_text("[]"), "mxfp4_manifest.json is damaged"),
    ],
)
def test_what_is_damaged_is_said(make, damage, reason):
    folder = make(3)
    damage(folder)
    assert why_incomplete(folder).startswith(reason)


def test_a_missing_folder_is_not_whole(tmp_path):
    assert why_incomplete(tmp_path / "checkpoint-1") == "there is no such folder"


def test_the_checkpoint_of_another_trainer_is_taken_as_it_is(make):
    folder = make(3, manifest=False)
    assert why_incomplete(folder) is None


def test_one_that_is_written_over_counts_no_more(make):
    folder = make(3)
    invalidate(folder)
    assert why_incomplete(folder) == "it has no trainer_state.json: saving it was not finished"
    assert (folder / "optimizer.pt").is_file()
    invalidate(folder)  # again, or of a new folder: nothing to do


def test_the_newest_whole_one_by_number(make, tmp_path, caplog):
    for step in (2, 9, 10, 11):
        make(step)
    (tmp_path / "checkpoint-30").write_text("a file")
    (tmp_path / "checkpoint-11" / "optimizer.pt").unlink()
    logger = get_logger()
    logger.addHandler(caplog.handler)
    try:
        assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage().rpartition("/")[2] for record in caplog.records] == [
        "checkpoint-11 is not resumed from: optimizer.pt: it is missing"
    ]


def test_no_checkpoint_at_all(tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "missing") is None


def test_the_draft_of_a_killed_process_is_no_part_of_the_manifest(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    (folder / ".draft-0123").write_text("{")
    assert write_whole_manifest(folder) == 0 and why_incomplete(folder) is None


def test_a_manifest_of_sizes_is_still_read(make):
    folder = make(3)
    (folder / MANIFEST).write_text('{"files": {"optimizer.pt": 7, "global_step/shard.pt": 5}}')
    assert why_incomplete(folder) is None
    (folder / "optimizer.pt").write_bytes(b"w")
    assert why_incomplete(folder) == "optimizer.pt: it has 1 bytes instead of 7"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
def test_a_manifest_that_points_outside_is_refused(make, name):
    folder = make(3)
    (folder / MANIFEST).write_text(json.dumps({"files": {name: 1}}))
    assert "outside of the folder" in why_incomplete(folder)
