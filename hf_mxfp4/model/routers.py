# SPDX-License-Identifier: Apache-2.0
"""Routers of mixture-of-experts models: where they are, what they choose, and choosing again as recorded.

In transformers 5 (checked in 5.17 and 5.24) a router is a module of its own that takes the hidden states and returns
``(logits [T, E], weights [T, k], indices [T, k])`` for the T tokens of a batch (GraniteMoE of 5.17 in the reverse
order), and chooses by `torch.topk`. The weights are what its architecture makes of the chosen logits.

Rollout routing replay (R3, arXiv 2510.11370) has training choose the experts that generation chose. The router runs
unchanged but for its `torch.topk`, which gives the recorded indices and the values found there, so gradients reach the
router through the weights of the chosen experts.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..utils import replaced_method


#: In a recording, in place of expert indices: the router chooses for itself.
UNRECORDED = -1


class RouterReplayError(RuntimeError):
    """Recorded choices do not cover the tokens of a training batch."""


# ---- where routers are --------------------------------------------------------------------------------------------


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """[`present_routers`]; raises `ValueError` when there is none."""
    routers = present_routers(model)
    if not routers:
        raise ValueError(
            f"{type(model).__name__} has no router: no module has top_k, num_experts and a weight of [num_experts, "
            "hidden], and none is declared; router options are for mixture-of-experts models"
        )
    return routers


def present_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of ``model`` by name, none for a dense model.

    Found by structure (a 2-D ``weight`` with one row for each of ``num_experts``, and ``top_k``), and by what a
    transformers model says about the origin of its router logits.
    """
    declared = tuple({kind for module in model.modules() for kind in _declared_routers(module)})
    return {
        name: module
        for name, module in model.named_modules()
        # Of a router that PEFT trains a copy of (modules_to_save), the copy is the one that runs.
        if not name.endswith(".original_module") and (isinstance(module, declared) or _looks_like_a_router(module))
    }


def _looks_like_a_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not isinstance(getattr(module, "top_k", None), int):
        return False
    return weight.shape[0] == getattr(module, "num_experts", None)


def _declared_routers(module: nn.Module) -> list[type[nn.Module]]:
    """Return the classes that a transformers model names as the source of ``router_logits``."""
    declared = getattr(type(module), "_can_record_outputs", None)
    recorders = declared.get("router_logits", []) if isinstance(declared, dict) else []
    recorders = recorders if isinstance(recorders, (list, tuple)) else [recorders]
    kinds = [getattr(recorder, "target_class", recorder) for recorder in recorders]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, nn.Module)]


def choice_agreement(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the share of each token's experts in ``a`` that ``b`` chose too, in any order: ``[..., k]`` twice,
    distinct along the last axis, -> float32 ``[...]`` in [0, 1]. Raises `ValueError` when the shapes differ."""
    if a.shape != b.shape:
        raise ValueError(f"two routings of the same tokens have one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    return (a.unsqueeze(-1) == b.unsqueeze(-2)).any(dim=-1).float().mean(dim=-1)


# ---- what they choose ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded_choices(routers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Within the context, every forward pass of a router appends its expert indices ``[T, k]`` to its list. A router
    that does not return them raises `ValueError`."""
    choices: dict[str, list[torch.Tensor]] = {name: [] for name in routers}

    def hook(name: str):
        return lambda module, args, output: choices[name].append(_choices_of(name, module, output).detach())

    with contextlib.ExitStack() as stack:
        for name, router in routers.items():
            stack.callback(router.register_forward_hook(hook(name)).remove)
        yield choices


def _choices_of(name: str, module: nn.Module, output: Any) -> torch.Tensor:
    """Return the expert indices ``[T, k]`` in a router's output: its only integers."""
    parts = output if isinstance(output, tuple) else (output,)
    integers = [p for p in parts if isinstance(p, torch.Tensor) and p.dtype in (torch.int64, torch.int32)]
    if len(integers) == 1 and integers[0].dim() == 2:
        return integers[0]
    raise ValueError(
        f"{name} ({type(module).__name__}) does not return the indices of the experts it chooses ([tokens, k]), so its "
        "choices are not known; router telemetry and router replay do not work with this architecture"
    )


class ChoiceRecorder:
    """Records generation by `generate` with a key-value cache: the prompts at once, then one token of every sequence at
    a time. The input embeddings show which tokens each pass is about."""

    def __init__(self, model: nn.Module, routers: Mapping[str, nn.Module]):
        self.routers = routers
        self._embeddings = model.get_input_embeddings()
        self._tokens: list[torch.Tensor] = []
        self._choices: dict[str, list[torch.Tensor]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the passes within, in place of those recorded before."""
        self._tokens = []
        handle = self._embeddings.register_forward_hook(lambda _, args, __: self._tokens.append(args[0].detach()))
        with contextlib.ExitStack() as stack:
            stack.callback(handle.remove)
            self._choices = stack.enter_context(recorded_choices(self.routers))
            yield

    def rows(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the choices for each sequence of token ids, int16 ``[len(prompt) + len(completion) - 1, layers, k]``
        on the CPU: no pass has routed the last token, and no log-probability depends on it.

        Raises `ValueError` when the recorded passes are not those of a generation with a key-value cache, or are about
        other tokens than these.
        """
        tokens, choices = self._passes()
        width = self._tokens[0].shape[1]
        rows = []
        if len(tokens) != len(prompts):
            raise ValueError(f"router replay recorded {len(tokens)} sequences but {len(prompts)} came back")
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            fed = torch.tensor([*prompt, *completion][:-1])
            start = width - len(prompt)
            if start < 0 or not torch.equal(tokens[row, start : start + len(fed)], fed):
                raise ValueError(
                    f"router replay: sequence {row} came back with {len(prompt)} + {len(completion)} tokens that are "
                    f"not the {tokens.shape[1]} that were routed while it was generated; it cannot be replayed"
                )
            rows.append(choices[row, start : start + len(fed)].clone())
        self._tokens = []
        self._choices = {}
        return rows

    def _passes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All passes together: tokens ``[B, S]`` and choices ``[B, S, layers, k]``."""
        shapes = [tuple(tokens.shape) for tokens in self._tokens]
        steps = len(shapes)
        if not steps or any(shape != (shapes[0][0], 1) for shape in shapes[1:]):
            raise ValueError(
                "router replay records generation by transformers with a key-value cache (the prompts, then one token "
                f"of each sequence at a time), but the passes had the shapes {shapes[:4]}; set use_cache=True in the "
                "generation config, without assisted or chunked decoding"
            )
        expected = [batch * length for batch, length in shapes]
        for name, recorded in self._choices.items():
            sizes = [len(choice) for choice in recorded]
            if sizes != expected:
                raise ValueError(
                    f"router replay: {name} routed {sum(sizes)} tokens in {len(sizes)} passes while the model read "
                    f"{sum(expected)} in {steps}; generation does not go through the model's own routers"
                )
        batch = shapes[0][0]
        layers = [
            torch.cat([choice.to(torch.int16).view(batch, -1, choice.shape[-1]) for choice in recorded], dim=1)
            for recorded in self._choices.values()
        ]
        return torch.cat(self._tokens, dim=1).cpu(), torch.stack(layers, dim=2).cpu()


# ---- choosing again -----------------------------------------------------------------------------------------------


@dataclass
class ReplayReport:
    """What one replay did: of ``tokens`` to be covered, ``covered`` have recorded choices; and by router the share of
    the replayed choices that it would have made by itself."""

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
    take all of it, since gradient checkpointing repeats passes; its backward pass belongs into the context too.

    Args:
        routers: of [`find_routers`], in the order of the layer axis.
        choices: expert indices ``[B, L, layers, k]`` of any integer dtype, -1 where nothing is recorded.
        required: bool ``[B, L]``: the tokens that must be covered.

    Raises `RouterReplayError` when a required token has no recorded choice (on entry), or a router did not run over the
    whole batch (at the end), and `ValueError` when ``choices`` does not fit the routers or ``required``.
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
    replays = [_Replay(*pair, choices[:, :, layer], required) for layer, pair in enumerate(routers.items())]
    with contextlib.ExitStack() as stack:
        for replay in replays:
            stack.enter_context(replaced_method(replay.router, "forward", replay.forward))
        yield report
        for replay in replays:
            if replay.seen < len(choices):
                raise RouterReplayError(
                    f"router replay: {replay.name} chose for {replay.seen} of {len(choices)} sequences of the batch; "
                    "the pass does not go through the model's own routers"
                )
            report.agreement[replay.name] = replay.agreement()


class _Replay:
    """One router, its recorded choices ``[B, L, k]``, and how far passes have come."""

    def __init__(self, name: str, router: nn.Module, choices: torch.Tensor, required: torch.Tensor):
        self.name = name
        self.router = router
        self.choices = choices
        self.required = required
        self.seen = 0  # rows of the batch that have passed at least once
        self._free = router.forward
        self._next = 0
        self._agreed, self._counted = 0.0, 0  # tokens

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Run the router's forward pass with its `torch.topk` replaced."""
        part = self._part(hidden_states)
        first_time, self.seen = part.stop > self.seen, max(self.seen, part.stop)
        choices = self.choices[part].flatten(0, 1).to(hidden_states.device, torch.long)
        with _ReplayedTopK(choices, self.router) as topk:
            output = self._free(hidden_states, *args, **kwargs)
        if topk.replaced != 1:
            raise RouterReplayError(
                f"router replay: {self.name} ({type(self.router).__name__}) chose {topk.replaced} times by torch.topk "
                "where once was expected; router replay does not know this architecture"
            )
        if first_time:
            counted = self.required[part].flatten().to(hidden_states.device)
            self._agreed += (topk.agreement * counted).sum()
            self._counted += int(counted.sum())
        return output

    def _part(self, hidden_states: torch.Tensor) -> slice:
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
        return part

    def agreement(self) -> float:
        return float(self._agreed) / self._counted if self._counted else 1.0


class _ReplayedTopK(TorchFunctionMode):
    """`torch.topk` over all experts gives the recorded indices, and its own where none are recorded."""

    def __init__(self, choices: torch.Tensor, router: nn.Module):
        super().__init__()
        self.choices = choices
        self.n_experts = getattr(router, "num_experts", None)
        self.replaced = 0
        self.agreement = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk) or result.indices.shape != self.choices.shape:
            return result
        scores = kwargs["input"] if "input" in kwargs else args[0]
        if self.n_experts not in (None, scores.shape[-1]):
            return result  # the choice among groups of experts
        self.replaced += 1
        indices = torch.where(self.choices == UNRECORDED, result.indices, self.choices)
        self.agreement = choice_agreement(indices, result.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
