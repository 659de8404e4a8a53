# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a run, one subject a module, and the table of those that measure something every few steps."""

from .errors import ActivationErrorCallback, ErrorCallback
from .movement import StepMovementCallback
from .periodic import PeriodicCallback


#: What [`MXFP4GRPOTrainer`] measures, by the attribute that its callback becomes. A new metric is a subclass of
#: [`PeriodicCallback`] in a module of this folder, and a line here.
MEASUREMENTS: dict[str, type[PeriodicCallback]] = {
    "error_callback": ErrorCallback,
    "activation_callback": ActivationErrorCallback,
    "movement_callback": StepMovementCallback,
}
