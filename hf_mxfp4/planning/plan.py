# SPDX-License-Identifier: Apache-2.0
"""Bytes per GPU of a run under every strategy, and what fits.

Sizes of states and of what is saved for the backward pass come from the model's own code, run without memory. Buffers
of engines and working memory are estimates, and named so.
"""

from dataclasses import dataclass, field, replace

import torch
from transformers import PretrainedConfig

from ..config import MXFP4RLConfig
from ..gemm.storage.packed_weight import packed_shapes
from ..numerics import QuantScheme
from .meta_model import build
from .sizes import Activations, ModelSizes, activations, cache_bytes_per_token, model_sizes
from .strategies import OPTIMIZERS, STRATEGIES, Strategy, reference_bytes, state_parts


#: The head of TRL 1.16 computes logits in tiles of tokens and of vocabulary (`trl.kernels.chunked_logprob`).
_TILE_TOKENS, _TILE_VOCABULARY = 4096, 32768
#: Activations of the widest layer's size that live at one time beside what is saved.
_WORKING_COPIES = 4
_MOST_SEQUENCES = 4096
_MOST_GPUS = 1024


@dataclass(frozen=True)
class Setup:
    """What is to be trained, and on what.

    Attributes:
        quantization: of mode ``"qat"``, or `None` for full precision.
        packed: of mode ``"packed"``.
        gpus, gpu_memory: their number, and bytes of each.
        batch: sequences per GPU and pass.
        prompt, completion: tokens of each.
        rollout_batch: sequences per GPU that are sampled at once; `None` for ``batch``.
        dtype: of the trained weights.
        compute: of the products, by autocast where ``dtype`` is another.
        optimizer: one of [`hf_mxfp4.planning.OPTIMIZERS`].
        checkpointing: of gradients.
        logits: ``"chunked"`` as TRL's trainers compute them, or ``"full"``, the loss of transformers.
        reference: whether there is a reference model (beta > 0).
        rollouts: whether this process samples; not so with a vLLM server.
        cache_rollout_weights: as in `MXFP4GRPOConfig`.
        rollout_weights: likewise, ``"dense"`` or ``"packed"``: the latter is what ``"auto"`` means on GPUs with
            Triton.
        step_weights: likewise, ``"dense"``, ``"packed"`` or ``"none"``; none where weights are sharded.
        lora_rank: of the adapters on packed weights.
        headroom: share of the memory left for the CUDA context, fragmentation and communication.

    Raises `ValueError` for what is out of range.
    """

    quantization: MXFP4RLConfig | None
    packed: MXFP4RLConfig = field(default_factory=lambda: MXFP4RLConfig(mode="packed"))
    gpus: int = 1
    gpu_memory: float = 80e9
    batch: int = 8
    prompt: int = 512
    completion: int = 512
    rollout_batch: int | None = None
    dtype: torch.dtype = torch.float32
    compute: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"
    checkpointing: bool = True
    logits: str = "chunked"
    reference: bool = False
    rollouts: bool = True
    cache_rollout_weights: bool = True
    rollout_weights: str = "dense"
    step_weights: str = "none"
    lora_rank: int = 16
    headroom: float = 0.1

    def __post_init__(self):
        for name in ("gpus", "batch", "prompt", "completion", "lora_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.headroom < 1 or not self.gpu_memory > 0:
            raise ValueError("headroom must be in [0, 1), and gpu_memory above 0")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r} is not known; choose one of {', '.join(OPTIMIZERS)}")
        if self.rollout_weights not in ("dense", "packed"):
            raise ValueError(f"rollout_weights={self.rollout_weights!r} is not known; choose 'dense' or 'packed'")
        if self.step_weights not in ("dense", "packed", "none"):
            raise ValueError(f"step_weights={self.step_weights!r} is not known; choose 'dense', 'packed' or 'none'")
        if self.logits not in ("chunked", "full"):
            raise ValueError(f"logits={self.logits!r} is not known; choose 'chunked' or 'full'")

    @property
    def length(self) -> int:
        """Return the tokens of a sequence."""
        return self.prompt + self.completion

    @property
    def usable(self) -> float:
        """Bytes of a GPU that a plan may use."""
        return (1 - self.headroom) * self.gpu_memory


@dataclass(frozen=True)
class StrategyPlan:
    """One strategy's bytes per GPU.

    Attributes:
        training, rollouts: parts of the two phases, of which the larger one counts; without rollouts here, the latter
            is empty.
        largest_batch: the most sequences per GPU that fit; 0 when none does.
    """

    strategy: Strategy
    training: dict[str, float]
    rollouts: dict[str, float]
    largest_batch: int
    fits: bool

    @property
    def peak(self) -> float:
        return max(sum(self.training.values()), sum(self.rollouts.values()))


class Model:
    """What is known of a model under one scheme: sizes, and bytes by length of the sequences."""

    def __init__(self, config: PretrainedConfig, setup: Setup, packed: bool):
        quantization = setup.packed if packed else setup.quantization
        # The packed base and what adapters compute in are of the dtype of products.
        dtype, rank = (setup.compute, setup.lora_rank) if packed else (setup.dtype, 0)
        self._model, self._mode = build(config, quantization, dtype, rank)
        self._autocast = setup.compute if setup.compute != torch.float32 else None
        self.sizes: ModelSizes = model_sizes(self._model)
        self.cache_per_token = cache_bytes_per_token(self._model, self._mode, self._autocast)
        self._activations: dict[tuple, Activations] = {}

    def activations(self, length: int, logits: bool) -> Activations:
        key = length, logits
        if key not in self._activations:
            self._activations[key] = activations(self._model, self._mode, length, self._autocast, logits)
        return self._activations[key]


class Planner:
    """Plans of one model; what was measured of it without memory is kept.

    Args:
        config: of the architecture.
        setup: the first one to plan; others may differ in everything but schemes, dtypes and rank.
    """

    def __init__(self, config: PretrainedConfig, setup: Setup):
        self._config, self._schemes = config, setup
        self._models: dict[bool, Model] = {}

    def model(self, packed: bool) -> Model:
        if packed not in self._models:
            self._models[packed] = Model(self._config, self._schemes, packed)
        return self._models[packed]

    def plan(self, setup: Setup, strategies: tuple[Strategy, ...] = STRATEGIES) -> list[StrategyPlan]:
        """Predict every strategy's bytes under ``setup``."""
        return [self._plan(setup, strategy) for strategy in strategies]

    def _plan(self, setup: Setup, strategy: Strategy) -> StrategyPlan:
        training, rollouts = self._training(setup, strategy), self._rollouts(setup, strategy)
        fits = max(sum(training.values()), sum(rollouts.values())) <= setup.usable
        return StrategyPlan(strategy, training, rollouts, self._largest_batch(setup, strategy), fits)

    def _training(self, setup: Setup, strategy: Strategy) -> dict[str, float]:
        model, compute = self.model(strategy.packed), setup.compute.itemsize
        sizes, tokens = model.sizes, setup.batch * setup.length
        saved = model.activations(setup.length, logits=False).bytes(setup.batch, setup.checkpointing)
        parts = state_parts(strategy, sizes, setup.gpus, setup.optimizer, compute)
        parts["reference model"] = reference_bytes(strategy, sizes, setup.gpus) if setup.reference else 0
        held = setup.gpus == 1 and not strategy.packed and not setup.checkpointing
        held = held or self._step_form(setup, strategy) == "dense"
        parts["quantized weights"] = self._quantized(setup, strategy, all_kept=held) + self._step_codes(setup, strategy)
        parts["saved activations"] = saved
        if setup.logits == "full":
            with_logits = model.activations(setup.length, logits=True).bytes(setup.batch, setup.checkpointing)
            # Beside what is saved: the logits themselves, and their gradient in float32.
            parts["logits"] = with_logits - saved + tokens * sizes.vocabulary * (compute + 4)
        else:
            tile = min(tokens, _TILE_TOKENS) * min(sizes.vocabulary, _TILE_VOCABULARY) * (compute + 8)
            parts["logits"] = tile + (4 * sizes.vocabulary * sizes.hidden if sizes.head_trained else 0)
        parts["working memory"] = _WORKING_COPIES * tokens * sizes.widest * compute
        return parts

    def _rollouts(self, setup: Setup, strategy: Strategy) -> dict[str, float]:
        if not setup.rollouts:
            return {}
        model, compute = self.model(strategy.packed), setup.compute.itemsize
        sizes, sequences = model.sizes, setup.rollout_batch or setup.batch
        parts = state_parts(strategy, sizes, setup.gpus, setup.optimizer, compute)
        del parts["gradients"]  # freed by the optimizer step
        parts["reference model"] = reference_bytes(strategy, sizes, setup.gpus) if setup.reference else 0
        if strategy.engine == "zero3":
            parts["gathered for generation"] = 2 * sizes.elements
        codes = self._step_codes(setup, strategy) if setup.rollout_weights == "dense" else 0
        parts["quantized weights"] = self._rollout_copies(setup, strategy) + codes
        parts["KV cache"] = sequences * setup.length * model.cache_per_token
        parts["logits"] = sequences * sizes.vocabulary * (compute + 4)
        return parts

    def _quantized(self, setup: Setup, strategy: Strategy, all_kept: bool) -> float:
        """Quantized or dequantized copies of weights: all that are kept in rollouts and, of trained weights, between
        the passes of one process without checkpointing (on CPUs); otherwise that of one layer."""
        if not strategy.packed and setup.quantization is None:
            return 0
        sizes = self.model(strategy.packed).sizes
        elements = max(sizes.largest_copy, sizes.cached_elements if all_kept else 0)
        return elements * setup.compute.itemsize

    def _rollout_copies(self, setup: Setup, strategy: Strategy) -> float:
        """[`_quantized`] of rollouts. Packed copies are computed with as they are; long prompts take a dequantized one
        of one layer beside. Packed layers need no copy then."""
        dense = self._quantized(setup, strategy, all_kept=setup.cache_rollout_weights)
        if setup.rollout_weights == "dense" or not setup.cache_rollout_weights or not dense:
            return dense
        scheme = setup.quantization
        if not strategy.packed and scheme.weights_alone_unsupported_reason is not None:
            return dense
        sizes = self.model(strategy.packed).sizes
        kept = 0 if strategy.packed else sizes.cached_elements * _packed_bytes(scheme.weight_scheme)
        return sizes.largest_copy * setup.compute.itemsize + kept

    def _step_form(self, setup: Setup, strategy: Strategy) -> str:
        """The form in which quantized weights are kept from a rollout to the last backward pass of its step."""
        scheme, is_whole = setup.quantization, strategy.engine in ("ddp", "zero2")
        if strategy.packed or scheme is None or not is_whole or not setup.cache_rollout_weights:
            return "none"
        unpacked = setup.step_weights == "packed" and scheme.weights_alone_unsupported_reason is not None
        return "dense" if unpacked else setup.step_weights

    def _step_codes(self, setup: Setup, strategy: Strategy) -> float:
        """Bytes of the codes that are kept with [`_step_form`]: as such, or since rollouts compute on them."""
        form, scheme = self._step_form(setup, strategy), setup.quantization
        on_codes = setup.rollouts and setup.rollout_weights == "packed"
        if form == "none" or scheme.weights_alone_unsupported_reason is not None or form == "dense" and not on_codes:
            return 0
        return self.model(strategy.packed).sizes.cached_elements * _packed_bytes(scheme.weight_scheme)

    def _largest_batch(self, setup: Setup, strategy: Strategy) -> int:
        def fits(batch: int) -> bool:
            other = replace(setup, batch=batch)
            peak = max(sum(self._training(other, strategy).values()), sum(self._rollouts(other, strategy).values()))
            return peak <= setup.usable

        low, high = 0, _MOST_SEQUENCES + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def advice(self, setup: Setup, strategies: tuple[Strategy, ...]) -> list[str]:
        """Say what would make one of ``strategies`` fit, where none does."""
        found = []
        plans = self.plan(setup, strategies)
        best = max(plans, key=lambda plan: plan.largest_batch)
        if best.largest_batch:
            found.append(f"a batch of {best.largest_batch} per GPU ({best.strategy.name})")
        if not setup.checkpointing and any(p.fits for p in self.plan(replace(setup, checkpointing=True), strategies)):
            found.append("gradient checkpointing")
        uncached = replace(setup, cache_rollout_weights=False)
        if setup.rollouts and setup.cache_rollout_weights and any(p.fits for p in self.plan(uncached, strategies)):
            found.append("cache_rollout_weights: false (slower rollouts)")
        if setup.rollouts and any(p.fits for p in self.plan(replace(setup, rollouts=False), strategies)):
            found.append("rollouts on a vLLM server")
        gpus = setup.gpus
        while gpus < _MOST_GPUS:
            gpus *= 2
            fitting = [p.strategy.name for p in self.plan(replace(setup, gpus=gpus), strategies) if p.fits]
            if fitting:
                found.append(f"{gpus} GPUs ({', '.join(fitting)})")
                break
        length = setup.length // 2
        while length >= 64:
            shorter = replace(setup, prompt=max(1, length // 2), completion=max(1, length - length // 2))
            if any(p.fits for p in self.plan(shorter, strategies)):
                found.append(f"sequences of {length} tokens instead of {setup.length}")
                break
            length //= 2
        others = [s for s in STRATEGIES if s.packed and s not in strategies]
        found += [f"mode packed ({p.strategy.name})" for p in self.plan(setup, tuple(others)) if p.fits]
        return found


def _packed_bytes(scheme: QuantScheme) -> float:
    """Bytes for each element of a packed weight with long rows."""
    length = 1 << 16
    return sum(columns for _, columns in packed_shapes(1, length, scheme).values()) / length
