# SPDX-License-Identifier: Apache-2.0
"""Runs in which a mistake of another project would show."""

import pytest
from grpo_runs import trainer_factory


@pytest.fixture
def run(tmp_path):
    return trainer_factory(tmp_path)
