# SPDX-License-Identifier: Apache-2.0
"""Logits of a causal language model from the last hidden states of its decoder, a few rows at a time.

The model is called with its decoder replaced by something that returns the states, so that whatever it does to states
and logits around its head (scaling, soft-capping) is done to these.
"""

import torch
from torch import nn

from ...layers import QUANTIZED
from ...module_names import split_linears


#: Tokens that are used to find out whether it works.
_TRIAL_TOKENS = 64
#: How far logits of fewer rows at a time may be from those of all, relative to the largest.
_ROUNDING = 1e-2


class Replay:
    """The logits of ``model``, ``vocabulary`` for each token, from what its decoder gives. Made by [`of`], which has
    tried it."""

    def __init__(self, model: nn.Module, decoder: nn.Module, output_class: type, vocabulary: int):
        self._model, self._decoder, self._output_class = model, decoder, output_class
        self.vocabulary = vocabulary

    @classmethod
    def of(cls, model: nn.Module, ids: torch.Tensor) -> "Replay | None":
        """How to replay the logits of ``model``, or `None` where that does not give the bits that the model does for
        the first tokens of ``ids`` (``[1, tokens]``), nor, to rounding, for parts of them, and where something beside
        the decoder is or would be quantized."""
        ids = ids[:, :_TRIAL_TOKENS]
        tried = (cls._with(model, decoder, ids) for decoder in _decoders(model))
        return next((replay for replay in tried if replay is not None), None)

    @classmethod
    def _with(cls, model: nn.Module, decoder: nn.Module, ids: torch.Tensor) -> "Replay | None":
        inside = set(decoder.modules())
        layers = [*split_linears(model)[0].values(), *(m for m in model.modules() if isinstance(m, QUANTIZED))]
        if any(layer not in inside for layer in layers):
            return None
        outputs: list = []
        handle = decoder.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            logits = model(input_ids=ids, use_cache=False).logits
        finally:
            handle.remove()
        states = getattr(outputs[0], "last_hidden_state", None) if len(outputs) == 1 else None
        if states is None or states.shape[:2] != ids.shape:
            return None
        replay = cls(model, decoder, type(outputs[0]), logits.shape[-1])
        half = ids.shape[1] // 2
        halves = [replay.logits(ids[:, part], states[:, part]) for part in (slice(0, half), slice(half, None))]
        far = (torch.cat(halves, 1).float() - logits.float()).abs().max() > _ROUNDING * logits.float().abs().max()
        return replay if not far and torch.equal(replay.logits(ids, states), logits) else None

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """What the decoder gives for the tokens ``ids``, ``[1, tokens, width]``; the head computes one row."""
        kept = []

        def narrow(module, args, output):
            kept.append(output.last_hidden_state)
            return self._output_class(last_hidden_state=kept[0][:, -1:])

        handle = self._decoder.register_forward_hook(narrow)
        try:
            self._model(input_ids=ids, use_cache=False)
        finally:
            handle.remove()
        return kept[0]

    def logits(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits ``[1, tokens, vocabulary]`` of the positions that have these tokens and states, in the model's
        dtype."""
        own = self._decoder.__dict__.get("forward")
        self._decoder.forward = lambda *args, **options: self._output_class(last_hidden_state=states)
        try:
            return self._model(input_ids=ids, use_cache=False).logits
        finally:
            del self._decoder.forward
            if own is not None:
                self._decoder.forward = own


class Logits:
    """The logits of one text.

    Args:
        ids: its tokens, ``[1, tokens]``.
        replay: computes rows of logits as they are asked for; without one all are computed now.
        states: what the decoder gave, where that is known.
    """

    def __init__(self, model: nn.Module, ids: torch.Tensor, replay: Replay | None, states: torch.Tensor | None = None):
        self._ids, self._replay = ids, replay
        if replay is None:
            self._all = model(input_ids=ids, use_cache=False).logits
            self.vocabulary = self._all.shape[-1]
        else:
            self.states = replay.states(ids) if states is None else states.to(ids.device)
            self.vocabulary = replay.vocabulary

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Those of positions ``begin`` to ``end``, ``[end - begin, vocabulary]``, in the model's dtype."""
        if self._replay is None:
            return self._all[0, begin:end]
        return self._replay.logits(self._ids[:, begin:end], self.states[:, begin:end])[0]


def _decoders(model: nn.Module) -> list[nn.Module]:
    """What may be called to get the states that the head takes: what is below the head, or a part of that."""
    named = [getattr(model, "base_model", None), getattr(model, "get_decoder", lambda: None)()]
    found = [module for module in named if isinstance(module, nn.Module) and module is not model]
    return list(dict.fromkeys(found))
