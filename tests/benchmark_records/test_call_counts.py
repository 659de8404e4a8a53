# SPDX-License-Identifier: Apache-2.0
"""The count of calls, and how many Python calls one of a layer may make."""

import pytest

from benchmarks import call_counts


@pytest.mark.parametrize(("flow", "most"), [("cpu", 60), ("kept", 75), ("packed", 55), ("train", 100)])
def test_a_call_of_a_layer_makes_few_python_calls(flow, most):
    counter, microseconds = call_counts.count(flow)
    assert 5 < counter.depth <= counter.calls <= most and microseconds > 1
    assert any(file.endswith("linear.py") for file in counter.files)


def test_calls_are_those_of_the_second_time(tmp_path):
    counter = call_counts.Counter((str(tmp_path),))
    source = "def outer():\n    inner(); inner()\ndef inner():\n    len([])\n"
    names = {}
    exec(compile(source, str(tmp_path / "some.py"), "exec"), names)
    with counter:
        names["outer"]()
    assert (counter.calls, counter.depth, len(counter.files)) == (3, 2, 1)
