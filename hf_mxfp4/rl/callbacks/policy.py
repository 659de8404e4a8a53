# SPDX-License-Identifier: Apache-2.0
"""Callbacks that compute the policy in full precision beside its quantized self, on sequences of the last training
batch: how its distribution and its gradients differ."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import TrainerCallback

from ...analysis.policy.gradient_gain import training_gradient_gain
from ...analysis.policy.predictions import IGNORED, policy_logits
from ...analysis.policy.temperature import effective_temperature
from ...layers import PACKED, full_precision


#: What is measured on, to bound time and memory: 8 sequences, more if they have few tokens; of the logits those of 256
#: positions; and for gradients, of whose way down everything is kept, 2048 tokens.
_SEQUENCES, _TOKENS, _MAX_POSITIONS, _MAX_TOKENS = 8, 1024, 256, 2048
#: Ids, labels and attention mask ``[sequences, length]``.
Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TrainingBatch:
    """Token ids, attention mask and completion mask ``[batch, length]`` of a training batch."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_mask: torch.Tensor

    def sample(self, max_tokens: int | None = None) -> Sample:
        """Ids, labels (-100 but for completions) and attention mask of the first sequences with a completion that
        counts: 8, or as many as have 1024 tokens together. Where none counts, of the first as they are: all processes
        of a job are to measure at the same time.

        Args:
            max_tokens: limit of the tokens together, padding included: fewer sequences then. One that is longer is cut
                at its end, and at its start as far as half of the limit is left for the prompt.
        """
        if max_tokens is not None and self.input_ids.shape[1] > max_tokens:
            return self._cut(max_tokens).sample(max_tokens)
        length = self.input_ids.shape[1]
        count = max(_SEQUENCES, _TOKENS // length)
        if max_tokens is not None:
            count = min(count, max_tokens // length)
        rows = self.completion_mask.bool().any(dim=1).nonzero().flatten()[:count]
        if len(rows) == 0:
            ids = self.input_ids[:count]
            return ids, ids, torch.ones_like(ids)
        ids = self.input_ids[rows]
        return ids, ids.masked_fill(~self.completion_mask[rows].bool(), IGNORED), self.attention_mask[rows]

    def _cut(self, length: int) -> "TrainingBatch":
        """Columns around the first token of a completion, which is in the same column for all sequences."""
        first = int(self.completion_mask.bool().any(dim=0).int().argmax())
        start = min(max(0, first - length // 2), self.input_ids.shape[1] - length)
        columns = slice(start, start + length)
        return TrainingBatch(*(x[:, columns] for x in (self.input_ids, self.attention_mask, self.completion_mask)))


class _LastBatchCallback(TrainerCallback):
    """Measures every ``every`` steps, and after the last one, on the last training batch."""

    #: As of [`TrainingBatch.sample`].
    max_tokens: int | None = None

    def __init__(
        self,
        model: nn.Module,
        every: int,
        batch: Callable[[], TrainingBatch | None],
        record: Callable[[str, float], None],
    ):
        self.every, self.batch, self.record = every, batch, record
        self.history: list[dict] = []
        with full_precision(model):
            pass

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        batch = self.batch()
        if batch is None:
            return
        metrics = self._measure(model, batch.sample(self.max_tokens), state.global_step, args)
        for name, value in metrics.items():
            self.record(name, value if math.isfinite(value) else math.nan)

    def _measure(self, model: nn.Module, sample: Sample, step: int, args) -> dict[str, float]:
        raise NotImplementedError


class TemperatureCallback(_LastBatchCallback):
    """The sampling temperature that quantization amounts to: the T at which the policy in full precision comes closest
    to the quantized one in KL divergence ([`hf_mxfp4.analysis.policy.temperature`]); 1 is no change, above it flatter.

    Metrics: `entropy/effective_temperature`, and `entropy/quantization_kl`, the KL divergence of the quantized policy
    from that in full precision at T = 1, in nats per token. On completion tokens of the last training batch (8
    sequences, or more of few tokens, and 256 positions at the most), at the sampling temperature of the run.

    Cost of a measurement: two forward passes of these sequences without gradients, and float64 copies of the logits
    of 256 positions (about 2.5 GB for a vocabulary of 150,000). No other logits are computed.

    Args:
        model: the policy.
        every: steps between measurements; also measured after the last one.
        batch: gives the last training batch; `None` where the model needs more than its tokens.
        record: called with a metric's name and value, normally the trainer's log. NaN where nothing could be measured.

    Attributes:
        history: one dictionary per measurement: `step`, and the attributes of `EffectiveTemperature`.

    Raises `ValueError` for a model without master weights in full precision, or without a quantized layer.
    """

    def _measure(self, model, sample, step, args):
        ids, labels, mask = sample
        labels = _thinned(labels)
        quantized = policy_logits(model, ids, labels, mask) / args.temperature
        with full_precision(model):
            reference = policy_logits(model, ids, labels, mask) / args.temperature
        if not (torch.isfinite(reference).all() and torch.isfinite(quantized).all()):
            return {"entropy/effective_temperature": math.nan, "entropy/quantization_kl": math.nan}
        found = effective_temperature(reference, quantized, tolerance=1e-6)
        self.history.append({"step": step, **vars(found)})
        return {"entropy/effective_temperature": found.measured, "entropy/quantization_kl": found.kl}


class GradientGainCallback(_LastBatchCallback):
    """What quantization does to gradients on their way down the stack of decoder layers.

    The loss is the negative log-likelihood of the completions in the last training batch: 8 sequences, or more of few
    tokens. Together they have at most 2048 tokens: of long ones fewer are taken, and a single longer one is cut.

    For the input of each decoder layer, the norm of its gradient in the quantized model is divided by that in full
    precision: log2 of this gain is 0 when quantization leaves the size of gradients alone. arXiv 2605.20402 (section 3)
    has scale bias multiply up from layer to layer, which would show as a gain that grows (or spreads) with the distance
    from the output; see [`hf_mxfp4.analysis.policy.gradient_gain`] for why it need not, and what was measured.

    Metrics: `gradient_gain/last`, `gradient_gain/middle` and `gradient_gain/first`, the log2 gain at the input of the
    last, middle and first decoder layer (the first is where gradients went through all layers);
    `gradient_gain/log2_per_layer`, its slope over depth; `gradient_gain/cosine`, between the two gradients at the first
    layer: 1 is the same direction.

    Cost of a measurement: two forward and backward passes of these tokens, without gradient checkpointing; the logits
    of those in completions and their gradients, in the dtype of the weights (about 2.5 GB for 2048 tokens, float32 and
    a vocabulary of 150,000). No gradient of a parameter is touched.

    Args:
        model, every, batch, record: as of [`TemperatureCallback`].

    Attributes:
        history: one dictionary per measurement: `step`, and `log2_gain` and `cosine` by depth, from the output of the
            last layer (0) to the input of the first, of this process.

    Raises `ValueError` for a model without master weights in full precision, or without a quantized layer.
    """

    max_tokens = _MAX_TOKENS

    def _measure(self, model, sample, step, args):
        gain = training_gradient_gain(model, *sample)
        inputs = gain.depths[1:]
        self.history.append(
            {
                "step": step,
                "log2_gain": [depth.log2_gain for depth in gain.depths],
                "cosine": [depth.cosine for depth in gain.depths],
            }
        )
        return {
            "gradient_gain/last": inputs[0].log2_gain,
            "gradient_gain/middle": inputs[len(inputs) // 2].log2_gain,
            "gradient_gain/first": inputs[-1].log2_gain,
            "gradient_gain/log2_per_layer": gain.log2_growth_per_layer,
            "gradient_gain/cosine": inputs[-1].cosine,
        }


def _thinned(labels: torch.Tensor) -> torch.Tensor:
    """Labels of which at most 256 count, evenly spread over those that did."""
    counting = (labels != IGNORED).flatten().nonzero().flatten()
    kept = counting[:: max(1, -(-len(counting) // _MAX_POSITIONS))]
    thinned = torch.full_like(labels, IGNORED).flatten()
    thinned[kept] = labels.flatten()[kept]
    return thinned.view_as(labels)


def can_compare(model: nn.Module) -> bool:
    """Whether the policy has its weights in full precision beside the quantized ones."""
    return not any(isinstance(module, PACKED) for module in model.modules())
