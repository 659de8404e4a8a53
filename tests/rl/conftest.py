# SPDX-License-Identifier: Apache-2.0
"""What nearly every file about training asks for."""

import pytest
from grpo_runs import trainer_factory


@pytest.fixture
def build(tmp_path):
    """`build(reward=..., **options)` makes a trainer that writes to ``tmp_path / "run"``; its policy lies in
    ``tmp_path / "base"`` once one was made."""
    return trainer_factory(tmp_path)
