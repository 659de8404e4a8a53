# SPDX-License-Identifier: Apache-2.0
"""Rollout routing replay (R3, arXiv 2510.11370): training chooses the experts that generation chose.

Only the choice is replayed. The weights of the chosen experts are computed by the router from its own logits, as its
architecture does, so gradients reach the router through them. To this end the router runs unchanged but for its
`torch.topk`, which gives the recorded indices and the values found there.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..utils import replaced_method
from .find import choice_agreement


#: In a recording, in place of expert indices: the router chooses for itself.
UNRECORDED = -1


class RouterReplayError(RuntimeError):
    """Recorded choices do not cover the tokens of a training batch."""


@dataclass
class ReplayReport:
    """What one replay did.

    Attributes:
        tokens: tokens that had to be covered, each by all routers.
        covered: of these, those with recorded choices.
        agreement: by router, the share of the replayed choices that it would have made by itself. Empty before the
            forward pass.
    """

    tokens: int
    covered: int
    agreement: dict[str, float] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        """Share of covered tokens; 1 when there are none to cover."""
        return self.covered / self.tokens if self.tokens else 1.0

    @property
    def changed(self) -> float:
        """Share of the replayed choices that differ from free routing, averaged over the routers."""
        return 1 - sum(self.agreement.values()) / len(self.agreement) if self.agreement else 0.0


@contextlib.contextmanager
def replayed_choices(
    routers: Mapping[str, nn.Module], choices: torch.Tensor, required: torch.Tensor
) -> Iterator[ReplayReport]:
    """Within the context the routers choose the recorded experts, wherever some are recorded.

    The batch may come in parts of whole rows, one after the other, and any number of times. A pass with gradients must
    take all of it: gradient checkpointing repeats passes from the last layer to the first, and parts could not be told
    apart then. The backward pass of such a pass belongs into the context too.

    Args:
        routers: of [`find_routers`], in the order of the layer axis.
        choices: expert indices ``[B, L, layers, k]`` of any integer dtype, -1 where nothing is recorded.
        required: bool ``[B, L]``: the tokens that must be covered.

    Raises:
        RouterReplayError: a required token has no recorded choice (on entry), or a router did not run over the whole
            batch (at the end).
        ValueError: ``choices`` does not fit the routers or ``required``.
    """
    if choices.dim() != 4 or choices.shape[2] != len(routers) or choices.shape[:2] != required.shape:
        raise ValueError(
            f"choices {tuple(choices.shape)} must be [batch, length, {len(routers)} routers, k] for tokens "
            f"{tuple(required.shape)}"
        )
    required = required.bool().to(choices.device)
    recorded = (choices != UNRECORDED).flatten(2).all(dim=-1)
    report = ReplayReport(tokens=int(required.sum()), covered=int((required & recorded).sum()))
    if report.covered < report.tokens:
        rows = int((required & ~recorded).any(dim=1).sum())
        raise RouterReplayError(
            f"router replay covers {report.covered} of {report.tokens} tokens ({report.coverage:.1%}): in {rows} of "
            f"{len(choices)} sequences there are tokens that {len(routers)} routers would see without a recorded choice"
        )
    replays = {name: _Replay(name, choices[:, :, layer], required) for layer, name in enumerate(routers)}
    with contextlib.ExitStack() as stack:
        for name, router in routers.items():
            stack.enter_context(replaced_method(router, "forward", _replaying(router, replays[name])))
        yield report
        for name, replay in replays.items():
            if replay.seen < len(choices):
                raise RouterReplayError(
                    f"router replay: {name} chose for {replay.seen} of {len(choices)} sequences of the batch; "
                    "the pass does not go through the model's own routers"
                )
            report.agreement[name] = replay.agreement()


def _replaying(router: nn.Module, replay: "_Replay") -> Callable:
    """The router's forward pass, with its `torch.topk` replaced."""
    forward = router.forward

    def replaying(hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        with replay.of_pass(hidden_states, router) as topk:
            output = forward(hidden_states, *args, **kwargs)
        topk.check()
        return output

    return replaying


class _Replay:
    """The recorded choices of one router ``[B, L, k]``, and how far passes have come."""

    def __init__(self, name: str, choices: torch.Tensor, required: torch.Tensor):
        self.name, self.choices, self.required = name, choices, required
        self.seen = 0  # rows of the batch that have passed at least once
        self._next = 0
        self._agreements: list[tuple[torch.Tensor, int]] = []

    def of_pass(self, hidden_states: torch.Tensor, router: nn.Module) -> "_ReplayedTopK":
        """The replacement of `torch.topk` for the next pass, whose tokens are counted by the hidden states."""
        batch, length = self.choices.shape[:2]
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        rows = tokens // length
        if tokens % length or self._next + rows > batch:
            raise RouterReplayError(
                f"router replay: {self.name} got {tokens} tokens where {batch - self._next} sequences of {length} "
                "are left of the recorded batch"
            )
        if torch.is_grad_enabled() and rows != batch:
            raise RouterReplayError(
                f"router replay: {self.name} got {rows} of {batch} sequences in a pass with gradients; it must get all"
            )
        part = slice(self._next, self._next + rows)
        self._next = (self._next + rows) % batch
        first_time, self.seen = part.stop > self.seen, max(self.seen, part.stop)
        choices = self.choices[part].flatten(0, 1).to(hidden_states.device, torch.long)
        counted = self.required[part].flatten().to(hidden_states.device)
        return _ReplayedTopK(self.name, choices, router, self._count(counted) if first_time else None)

    def _count(self, counted: torch.Tensor):
        def count(free: torch.Tensor, choices: torch.Tensor) -> None:
            agreement = choice_agreement(choices, free)
            self._agreements.append(((agreement * counted).sum(), int(counted.sum())))

        return count

    def agreement(self) -> float:
        """The share of the choices that the router would have made by itself; 1 when none was to be covered."""
        tokens = sum(count for _, count in self._agreements)
        return float(sum(total for total, _ in self._agreements)) / tokens if tokens else 1.0


class _ReplayedTopK(TorchFunctionMode):
    """`torch.topk` over all experts gives the recorded indices, and its own where none are recorded."""

    def __init__(self, name: str, choices: torch.Tensor, router: nn.Module, count):
        super().__init__()
        self.name, self.choices, self.router, self.count = name, choices, router, count
        self.replaced = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk) or result.indices.shape != self.choices.shape:
            return result
        scores = kwargs["input"] if "input" in kwargs else args[0]
        if scores.shape[-1] != getattr(self.router, "num_experts", scores.shape[-1]):
            return result  # the choice among groups of experts
        self.replaced += 1
        free = result.indices
        indices = torch.where(self.choices == UNRECORDED, free, self.choices)
        if self.count is not None:
            self.count(free, indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def check(self) -> None:
        if self.replaced != 1:
            raise RouterReplayError(
                f"router replay: {self.name} ({type(self.router).__name__}) chose {self.replaced} times by torch.topk "
                "where once was expected; router replay does not know this architecture"
            )
