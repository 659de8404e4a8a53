# SPDX-License-Identifier: Apache-2.0
"""The experts that a colocated vLLM chose while it sampled, for router replay.

vLLM returns them where it is made with `enable_return_routed_experts`. TRL has no option for that and drops what else
comes with the tokens, so the option is added where TRL makes vLLM, and its answers are read as TRL gets them.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from trl.generation import vllm_generation

from ...moe import RouterReplayError
from ..config import MXFP4GRPOConfig
from .vllm_options import given_to_vllm


#: vLLM's option; it brings model runner V2, which it refuses to do without (and that needs Triton).
OPTION = "enable_return_routed_experts"

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@contextlib.contextmanager
def experts_returned(args: MXFP4GRPOConfig) -> Iterator[None]:
    """Within the context TRL makes a vLLM that returns the experts it chooses, if `router_replay` needs it to.

    Raises `ValueError` for a vLLM that cannot, before it loads anything.
    Raises `RuntimeError` at the end when TRL has made none.
    """
    if not (args.use_vllm and args.router_replay) or not hasattr(vllm_generation, "LLM"):  # without vLLM TRL says so
        yield
        return
    check_version()
    with given_to_vllm(lambda options: {**options, OPTION: True}):
        yield


def check_version() -> None:
    """Raise `ValueError` when the vLLM that is installed cannot return the experts that it chooses."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    if not hasattr(EngineArgs, OPTION):
        raise ValueError(
            f"router_replay=True with use_vllm=True needs {OPTION} of vLLM, which version {vllm.__version__} has not "
            "(0.32 has): use another version, or router_replay=False"
        )


class ServedChoices:
    """Records the experts of what TRL's colocated vLLM generates, as [`ChoiceRecorder`] does those of `generate`.

    Args:
        llm: TRL's, made within [`experts_returned`].
        routers: of the policy, of [`find_routers`]. Their order is that of the layer axis of what is recorded.

    Raises `ValueError` when the layers of the routers cannot be told from their names.
    """

    def __init__(self, llm: Any, routers: Mapping[str, nn.Module]):
        self._llm, self.routers = llm, routers
        self._outputs: list[Any] | None = None
        found = {name: _LAYER.search(name) for name in routers}
        unknown = [name for name, match in found.items() if match is None]
        self._layers = [int(match[1]) for match in found.values() if match is not None]
        if unknown or len(set(self._layers)) < len(self._layers):
            raise ValueError(
                "router replay with vLLM finds the experts of a router by the number of its layer, which the names "
                f"{', '.join(unknown or routers)} do not tell; set use_vllm=False or router_replay=False"
            )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records what vLLM generates within, in place of what it did before.

        Raises `RuntimeError` at the end unless it generated once.
        """
        outputs: list[list[Any]] = []
        own, generate = vars(self._llm).get("generate"), self._llm.generate

        def recorded(*args: Any, **kwargs: Any) -> list[Any]:
            outputs.append(generate(*args, **kwargs))
            return outputs[-1]

        self._llm.generate = recorded
        try:
            yield
        finally:
            del self._llm.generate
            if own is not None:
                self._llm.generate = own
        if len(outputs) != 1:
            raise RuntimeError(f"router replay records a rollout of one generation; vLLM ran {len(outputs)}")
        (self._outputs,) = outputs

    def rows(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The choices for each sequence, without its last token, which vLLM has not fed to the model either.

        Args:
            prompts, completions: token ids of what was generated, in the order of the batch.

        Returns:
            For each sequence int16 ``[len(prompt) + len(completion) - 1, layers, k]``, on the CPU.

        Raises `RouterReplayError` when vLLM returned no experts, or those of other tokens, layers or numbers of them.
        """
        outputs, self._outputs = self._outputs or [], None
        if len(outputs) != len(prompts):
            raise RouterReplayError(f"router replay: vLLM generated {len(outputs)} sequences of {len(prompts)}")
        sequences = enumerate(zip(outputs, prompts, completions, strict=True))
        return [self._row(number, *sequence) for number, sequence in sequences]

    def _row(self, number: int, output: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
        answer = output.outputs[0]
        if list(output.prompt_token_ids) != list(prompt) or list(answer.token_ids) != list(completion):
            raise RouterReplayError(
                f"router replay: sequence {number} came back with {len(prompt)} + {len(completion)} tokens that are "
                "not those that vLLM generated; it cannot be replayed"
            )
        experts = answer.routed_experts  # [tokens, all layers, k]
        if experts is None:
            raise RouterReplayError(
                f"router replay: vLLM returned no experts of sequence {number}; it was not made with {OPTION}"
            )
        tokens = len(prompt) + len(completion) - 1
        if len(experts) != tokens or experts.shape[1] <= max(self._layers):
            raise RouterReplayError(
                f"router replay: vLLM returned experts {tuple(experts.shape)} of sequence {number}, which is not "
                f"[{tokens} tokens, layers up to {max(self._layers)}, k]"
            )
        row = torch.from_numpy(experts[:, self._layers].astype("int16"))
        ordered = row.sort(dim=-1).values
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise RouterReplayError(
                f"router replay: vLLM returned the same expert twice for one token of sequence {number}: it has not "
                "recorded what this model's layers chose"
            )
        return row
