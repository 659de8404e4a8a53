# SPDX-License-Identifier: Apache-2.0
"""Routers of mixture-of-experts models: where they are, what they choose, and choosing again as recorded."""

from .find import choice_agreement, find_routers, present_routers
from .record import ChoiceRecorder, recorded_choices
from .replay import UNRECORDED, ReplayReport, RouterReplayError, replayed_choices


__all__ = [
    "ChoiceRecorder",
    "ReplayReport",
    "RouterReplayError",
    "UNRECORDED",
    "choice_agreement",
    "find_routers",
    "present_routers",
    "recorded_choices",
    "replayed_choices",
]
