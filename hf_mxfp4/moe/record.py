# SPDX-License-Identifier: Apache-2.0
"""What the routers of a model choose, recorded while it runs."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from .find import choices_of


@contextlib.contextmanager
def recorded_choices(routers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Within the context, every forward pass of a router appends its expert indices ``[T, k]`` to its list."""
    choices: dict[str, list[torch.Tensor]] = {name: [] for name in routers}

    def hook(name: str):
        def record(module: nn.Module, args: tuple, output: object) -> None:
            choices[name].append(choices_of(name, module, output).detach())

        return record

    handles = [router.register_forward_hook(hook(name)) for name, router in routers.items()]
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()


class ChoiceRecorder:
    """Records generation by `generate` with a key-value cache: the prompts at once, then one token of every sequence at
    a time.

    Args:
        model: the policy; its input embeddings show which tokens each pass is about.
        routers: of [`find_routers`].

    Attributes:
        routers: as given. Their order is that of the layer axis of what is recorded.
    """

    def __init__(self, model: nn.Module, routers: Mapping[str, nn.Module]):
        self.routers = routers
        self._embeddings = model.get_input_embeddings()
        self._tokens: list[torch.Tensor] = []
        self._choices: dict[str, list[torch.Tensor]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the passes within, in place of those recorded before."""
        self._tokens = []

        def record(module: nn.Module, args: tuple, output: object) -> None:
            self._tokens.append(args[0].detach())

        handle = self._embeddings.register_forward_hook(record)
        try:
            with recorded_choices(self.routers) as self._choices:
                yield
        finally:
            handle.remove()

    def rows(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The choices for each sequence, without padding and without the last token: generation ends with it, so no
        pass has routed it, and no log-probability depends on it.

        Args:
            prompts, completions: token ids of what was generated, in the order of the batch.

        Returns:
            For each sequence int16 ``[len(prompt) + len(completion) - 1, layers, k]``, on the CPU.

        Raises `ValueError` when the recorded passes are not those of a generation with a key-value cache, or are about
        other tokens than these.
        """
        tokens, choices = self._passes()
        width, rows = self._tokens[0].shape[1], []
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
        self._tokens, self._choices = [], {}
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
        for name, recorded in self._choices.items():
            sizes, expected = [len(choice) for choice in recorded], [batch * length for batch, length in shapes]
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
