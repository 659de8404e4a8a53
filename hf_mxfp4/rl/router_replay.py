# SPDX-License-Identifier: Apache-2.0
"""Router replay (R3, arXiv 2510.11370): a mixture trains with the experts that it chose while it sampled."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..model.routers import UNRECORDED, ChoiceRecorder, ReplayReport, RouterReplayError, find_routers, replayed_choices
from ..utils import replaced_method
from .vllm_engine import EXPERTS_OPTION


#: The recording in a batch of the trainer: int16 ``[B, prompt + completion, layers, k]``, -1 where nothing is recorded.
BATCH_KEY = "router_choices"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RouterReplay:
    """Records the experts of each rollout and replays them where the policy scores or trains on it (`router_replay`).

    Metrics of each batch that is trained on: `router_replay/coverage` and `router_replay/changed`, see
    [`ReplayReport`]. Raises `ValueError` when the model has no router.

    Args:
        llm: the colocated vLLM that samples; `None` for `generate`.
        is_scored_by_trl: whether TRL computes log-probabilities of each rollout before anything else does.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        record: Callable[[str, float], None],
        llm: Any = None,
        is_scored_by_trl: bool = False,
    ):
        self.routers = find_routers(model)
        self._accelerator = accelerator
        self._record = record
        if llm is None:
            self._recorder: ChoiceRecorder | ServedChoices = ChoiceRecorder(model, self.routers)
        else:
            self._recorder = ServedChoices(llm, self.routers)
        self._rows: list[torch.Tensor] | None = None
        self.is_scored_by_trl = is_scored_by_trl
        self._is_scored_next = False

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Record the experts of what is generated within this context."""
        self._rows = None
        return self._recorder.recording()

    def keep(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
        """Keep the recording of these sequences; raises `ValueError` when it does not belong to them."""
        self._rows = self._recorder.rows(prompts, completions)
        self._is_scored_next = self.is_scored_by_trl

    def padded(self, prompt_mask: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """Return the recording of the last rollout for its padded batch, prompts left and completions right:
        ``[B, P]``, ``[B, C]`` (for the width) -> int16 ``[B, P + C, layers, k]`` on the CPU. Raises
        `RouterReplayError` when no rollout of this size was recorded."""
        if self._rows is None or len(self._rows) != len(prompt_mask):
            recorded = 0 if self._rows is None else len(self._rows)
            raise RouterReplayError(
                f"router replay has recordings of {recorded} sequences for a batch of {len(prompt_mask)}"
            )
        width = prompt_mask.shape[1]
        shape = len(self._rows), width + completions.shape[1], *self._rows[0].shape[1:]
        batch = torch.full(shape, UNRECORDED, dtype=torch.int16)
        for target, row, length in zip(batch, self._rows, prompt_mask.sum(dim=1).tolist(), strict=True):
            start = width - int(length)
            target[start : start + len(row)] = row
        return batch

    @contextlib.contextmanager
    def scoring_next(self, mask: torch.Tensor, width: int) -> Iterator[None]:
        """Enter [`scoring`] where TRL computes log-probabilities of the last rollout for the first time, and do nothing
        otherwise. ``mask`` is ``[B, P + C]``, and ``width`` is C."""
        if not self._is_scored_next:
            yield
            return
        self._is_scored_next = False
        with self.scoring(mask[:, :-width], mask[:, -width:]):
            yield

    @contextlib.contextmanager
    def scoring(self, prompt_mask: torch.Tensor, completion_mask: torch.Tensor) -> Iterator[ReplayReport]:
        """Replay the last rollout while the policy computes its log-probabilities, without gradients."""
        choices = self.padded(prompt_mask, completion_mask)
        with replayed_choices(self.routers, choices, routed_tokens(prompt_mask, completion_mask)) as report:
            yield report

    @contextlib.contextmanager
    def training(self, inputs: dict[str, Any]) -> Iterator[ReplayReport]:
        """Replay the recording in a training batch, until its backward pass is over, and log what it did. Raises
        `RouterReplayError` when the batch has no recording, or one that does not cover it."""
        required = routed_tokens(inputs["prompt_mask"], inputs["completion_mask"])
        if inputs.get(BATCH_KEY) is None:
            raise RouterReplayError(
                f"router replay covers 0 of {int(required.sum())} tokens: the training batch has no recording "
                f"({BATCH_KEY!r}); it was not made by this trainer's rollout"
            )
        with replayed_choices(self.routers, inputs[BATCH_KEY], required) as report:
            yield report
        values = torch.tensor([[report.coverage, report.changed]], device=self._accelerator.device)
        coverage, changed = self._accelerator.gather(values).mean(dim=0).tolist()
        self._record("router_replay/coverage", coverage)
        self._record("router_replay/changed", changed)


def routed_tokens(prompt_mask: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """Return the tokens that generation fed to the model, bool ``[B, P + C]``: all but padding and the last token of
    each completion, whose routing no log-probability depends on."""
    completion_mask = completion_mask.bool()
    order = completion_mask.cumsum(dim=1)
    fed = completion_mask & (order < order[:, -1:])
    return torch.cat([prompt_mask.bool(), fed], dim=1)


class ServedChoices:
    """Records the experts of what TRL's colocated vLLM generates, as [`ChoiceRecorder`] does those of `generate`.
    Raises `ValueError` when the layers of the routers cannot be told from their names."""

    def __init__(self, llm: Any, routers: Mapping[str, nn.Module]):
        self._llm = llm
        self._outputs: list[Any] | None = None
        matches = {name: _LAYER.search(name) for name in routers}
        unknown = [name for name, match in matches.items() if match is None]
        self._layers = [int(match[1]) for match in matches.values() if match is not None]
        if unknown or len(set(self._layers)) < len(self._layers):
            raise ValueError(
                "router replay with vLLM finds the experts of a router by the number of its layer, which the names "
                f"{', '.join(unknown or routers)} do not tell; set use_vllm=False or router_replay=False"
            )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what vLLM generates within this context; raises `RuntimeError` at the end unless it generated once."""
        generations: list[list[Any]] = []
        generate = self._llm.generate

        def generate_recorded(*args: Any, **kwargs: Any) -> list[Any]:
            generations.append(generate(*args, **kwargs))
            return generations[-1]

        with replaced_method(self._llm, "generate", generate_recorded):
            yield
        if len(generations) != 1:
            raise RuntimeError(f"router replay records a rollout of one generation; vLLM ran {len(generations)}")
        self._outputs = generations[0]

    def rows(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return what [`ChoiceRecorder.rows`] does. Raises `RouterReplayError` when vLLM returned no experts, or those
        of other tokens, layers or numbers of them."""
        outputs = self._outputs or []
        self._outputs = None
        if len(outputs) != len(prompts):
            raise RouterReplayError(f"router replay: vLLM generated {len(outputs)} sequences of {len(prompts)}")
        numbers = range(len(outputs))
        return [self._row(*sequence) for sequence in zip(numbers, outputs, prompts, completions, strict=True)]

    def _row(self, number: int, output: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
        """Return the experts of sequence ``number``, int16 ``[tokens, layers with a router, k]``."""
        answer = output.outputs[0]
        tokens = len(prompt) + len(completion) - 1
        experts = answer.routed_experts  # [tokens, all layers, k]
        if list(output.prompt_token_ids) != list(prompt) or list(answer.token_ids) != list(completion):
            raise RouterReplayError(f"router replay: sequence {number} came back with other tokens than vLLM generated")
        if experts is None or len(experts) != tokens or experts.shape[1] <= max(self._layers):
            shape = None if experts is None else tuple(experts.shape)
            raise RouterReplayError(
                f"router replay: vLLM returned experts {shape} of sequence {number}, which is not [{tokens} tokens, "
                f"layers up to {max(self._layers)}, k]; it is to be made with {EXPERTS_OPTION}"
            )
        row = torch.from_numpy(experts[:, self._layers].astype("int16"))
        ordered = row.sort(dim=-1).values
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise RouterReplayError(
                f"router replay: vLLM returned the same expert twice for one token of sequence {number}: it has not "
                "recorded what this model's layers chose"
            )
        return row
