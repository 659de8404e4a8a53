# SPDX-License-Identifier: Apache-2.0
"""One progress bar for training, in place of the trainer's bar and its printed dictionaries."""

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback


class TrainingBar(TrainerCallback):
    """A bar over optimizer steps that shows logged values, by default reward, entropy and noise.

    Args:
        title: of the bar.
        shown: the keys of logged values and what to call them.
    """

    _GRPO = {"reward": "reward", "entropy": "entropy", "aqn/sigma": "sigma"}

    def __init__(self, title: str = "GRPO", shown: dict[str, str] | None = None):
        self.title = title
        self.shown = shown or self._GRPO
        self.bar: tqdm | None = None

    @classmethod
    def install(cls, trainer: Trainer, **options) -> None:
        """Replace the trainer's own progress output. ``options`` are those of the bar."""
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(cls(**options))

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.title, unit="step")

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        first = next(iter(self.shown))
        if self.bar is not None and logs and first in logs:
            shown = {short: f"{logs[key]:.3g}" for key, short in self.shown.items() if logs.get(key) is not None}
            self.bar.set_postfix(shown)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
