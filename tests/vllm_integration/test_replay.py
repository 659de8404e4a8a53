# SPDX-License-Identifier: Apache-2.0
"""Router replay with a colocated vLLM: training chooses the experts that vLLM chose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.vllm

HERE = Path(__file__).resolve().parent
PATHS = (HERE.parent.parent, HERE.parent.parent / "kernels", HERE.parent)


def test_training_routes_as_vllm_did(tmp_path):
    command = [sys.executable, str(HERE / "run_replay.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    # Two rollouts of eight sequences, each trained on twice in the order of a batch.
    rollouts = found["returned"][:8], found["returned"][8:]
    assert [sorted(batch) for batch in found["recorded"]] == [sorted(rollouts[step // 2]) for step in range(4)]
    assert found["as_recorded"] == found["covered"] == [True] * 4
    log = found["logged"]
    assert log["router_replay/coverage"] == [1.0] * 4
    # The routers that vLLM has are those that train: by themselves they choose alike, until they have learnt.
    changed = log["router_replay/changed"]
    assert changed[0] == changed[2] == 0.0 and changed[1] > 0.02
    for bound in ("min", "max"):
        assert log[f"sampling/importance_sampling_ratio/{bound}"] == pytest.approx([1, 1], abs=1e-4)
