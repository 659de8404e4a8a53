# SPDX-License-Identifier: Apache-2.0
"""How much memory a training run takes: predicted from the model's own code, run without memory."""

from .counters import LiveTensors, SavedTensors, state_bytes, unique_bytes
from .meta_model import read_config
from .plan import Planner, Setup, StrategyPlan
from .strategies import OPTIMIZERS, STRATEGIES, Strategy


__all__ = [
    "LiveTensors",
    "OPTIMIZERS",
    "Planner",
    "STRATEGIES",
    "SavedTensors",
    "Setup",
    "Strategy",
    "StrategyPlan",
    "read_config",
    "state_bytes",
    "unique_bytes",
]
