# SPDX-License-Identifier: Apache-2.0
import pytest
from undrawn import leave_figures_undrawn


@pytest.fixture
def no_figures(monkeypatch):
    """For a test that looks at none. Fixtures that last longer than a test still draw theirs."""
    leave_figures_undrawn(monkeypatch.setattr)
