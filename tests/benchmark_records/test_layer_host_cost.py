# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host's part in a layer's call: that it runs, and how many Python calls a call may make."""

import pytest

from benchmarks import layer_host_cost
from benchmarks.layer_host_cost import PLAIN


@pytest.fixture(scope="module")
def records():
    return {record["name"]: record for record in layer_host_cost.measure(rounds=2, calls=2)}


def test_every_layer_is_measured_beside_the_plain_one(records):
    assert len(records) == 13 and all(record["baseline"] == PLAIN for record in records.values())
    assert records[PLAIN]["over"] == records[PLAIN]["grad_over"] == records[PLAIN]["calls"] == 0
    assert all(record["value"] > 0 < record["grad_value"] for record in records.values())


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_a_call_with_a_kept_weight_makes_few_python_calls(records, preset):
    """They are 36 and 41, of packed layers 25 and 32, on the codes; fewer with dense copies. Five of them check that a
    tensor is in memory and that shapes fit, before C++ reads it."""
    assert records[f"MXFP4Linear, {preset}, weight kept"]["calls"] <= 41
    assert records[f"MXFP4PackedLinear, {preset}, weight kept"]["calls"] <= 32
