# SPDX-License-Identifier: Apache-2.0
"""Inputs of a model's linear layers on some texts, as their Gram matrices."""

from collections.abc import Mapping, Sequence

import torch

from ...hooks import hooked_inputs
from ..io.folder import CheckpointError, CheckpointFolder


#: Texts are joined and cut into windows of this many tokens.
WINDOW = 512
MAX_TOKENS = 1 << 14
#: Gram matrices that are kept at a time; more layers take more passes over the texts.
MAX_BYTES = 2 << 30


class Calibration:
    """Gram matrices of the inputs of linear layers, for as many layers at a time as fit into ``max_bytes``.

    The model is loaded as it is saved, a trained policy in its own scheme; it stays in memory.

    Args:
        layers: names of the layers -> their input features, in the order in which they will be asked for.
        texts: what the model is to read; of them at most 16384 tokens, in windows of 512.

    Raises [`CheckpointError`] where there is no tokenizer or less than one window of text.
    """

    def __init__(
        self, folder: CheckpointFolder, layers: Mapping[str, int], texts: Sequence[str], max_bytes: int = MAX_BYTES
    ):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder.path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"calibration texts need the tokenizer of {folder.path}: {error}") from error
        numbers = tokenizer("\n\n".join(texts), return_tensors="pt").input_ids[0, :MAX_TOKENS]
        self.n_tokens = len(numbers) // WINDOW * WINDOW
        if not self.n_tokens:
            raise CheckpointError(f"the calibration texts have {len(numbers)} tokens; give {WINDOW} or more")
        self._windows = numbers[: self.n_tokens].view(-1, WINDOW)
        loaded = AutoModelForCausalLM.from_pretrained(folder.path, dtype="auto", trust_remote_code=False)
        self._model = loaded.eval()
        self._layers, self._max_bytes = dict(layers), max_bytes
        self._grams: dict[str, torch.Tensor] = {}

    def gram(self, layer: str) -> torch.Tensor:
        """Sum of ``x x^T`` over all inputs of a layer, float32 ``[K, K]``; its memory is given up to the caller."""
        if layer not in self._grams:
            self._measure(self._next_layers(layer))
        return self._grams.pop(layer)

    def _next_layers(self, first: str) -> list[str]:
        names = list(self._layers)
        chosen, used = [], 0
        for name in names[names.index(first) :]:
            used += 4 * self._layers[name] ** 2
            if chosen and used > self._max_bytes:
                break
            chosen.append(name)
        return chosen

    @torch.no_grad()
    def _measure(self, names: Sequence[str]) -> None:
        self._grams = {name: torch.zeros(self._layers[name], self._layers[name]) for name in names}

        def add(name: str, x: torch.Tensor) -> None:
            rows = x.detach().flatten(0, -2).float()
            self._grams[name].addmm_(rows.t(), rows)

        def hook(name: str):
            return lambda module, arguments: add(name, arguments[0])

        with hooked_inputs((self._model.get_submodule(name), hook(name)) for name in names):
            for window in self._windows:
                self._model(window[None], use_cache=False, logits_to_keep=1)
