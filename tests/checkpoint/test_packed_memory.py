# SPDX-License-Identifier: Apache-2.0
"""Packing a sharded checkpoint as it is read needs the memory of the packed model and little more."""

import pytest

from benchmarks.packed_loading import bits_on_disk, llama_config, load, write_checkpoint


MB = 10**6


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big") / "source"
    return folder, *write_checkpoint(folder, llama_config(layers=6, hidden=1024, vocabulary=1000), 40 * MB)


def test_memory_time_and_size_of_packing_while_loading(big, tmp_path):
    source, total, largest = big
    assert total > 200 * MB and 30 * MB < largest < 60 * MB and len(list(source.glob("*.safetensors"))) > 4
    result, messages = load(source, tmp_path / "packed", {})
    assert 8 * result["packed_bytes"] / result["n_weights"] == 4.3125
    unquantized = total - 2 * result["n_weights"]
    buffers = result["footprint"] - result["packed_bytes"] - unquantized
    assert 0 <= buffers < 10_000  # rotary frequencies
    assert result["peak"] - result["before"] < result["footprint"] + largest + 40 * MB < total
    assert "Loading weights" in messages  # the progress bar
    assert 18 < result["sqnr_db"] < 21
    assert bits_on_disk(tmp_path / "packed", unquantized, result["n_weights"]) == pytest.approx(4.3125, rel=0.01)
