# SPDX-License-Identifier: Apache-2.0
"""Values that callbacks add to a log, and short lines on the console.

transformers prints all of a log, which here has more than 30 values."""

from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState

from ...utils import Mixin


_OF_A_STEP = ("loss", "reward", "completions/mean_length", "sampling/kl", "entropy")
#: What is shown of the log of a step, of an evaluation, and of the end of training.
_SHOWN = (*_OF_A_STEP, *(f"eval_{name}" for name in _OF_A_STEP), "train_runtime", "train_loss")


def add_to_log(state: TrainerState, logs: dict, values: dict[str, float]) -> None:
    """Add values to the line that is being logged, for the history and for the callbacks that come after."""
    if state.log_history:
        state.log_history[-1].update(values)
    logs.update(values)


class _ShortLogs(Mixin):
    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {"step": state.global_step}
        for name in _SHOWN:
            if logs and logs.get(name) is not None:
                shown[name] = logs[name]
        super().on_log(args, state, control, logs=shown, **kwargs)


class ShortPrinterCallback(_ShortLogs, PrinterCallback):
    """[`transformers.PrinterCallback`] with short lines."""


class ShortProgressCallback(_ShortLogs, ProgressCallback):
    """[`transformers.ProgressCallback`] with short lines."""


def shorten_printed_logs(callbacks: list[TrainerCallback]) -> None:
    """Replace transformers' callbacks that print by ones that print short lines; those of a user stay."""
    short = {PrinterCallback: ShortPrinterCallback, ProgressCallback: ShortProgressCallback}
    for place, callback in enumerate(callbacks):
        if type(callback) in short:
            callbacks[place] = short[type(callback)]()
