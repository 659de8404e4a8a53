# SPDX-License-Identifier: Apache-2.0
"""Adaptive quantization noise (AQN): Gaussian noise on RMSNorm weights while the policy samples (QeRL, arXiv
2510.11696, section 3.3; used for MXFP4 in arXiv 2605.20402).

It is added in the norm's forward pass, in float32, or to the weights that vLLM is given for a rollout. No parameter is
written, so there is nothing to restore, and bfloat16 weights do not round small noise away.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model.layer_names import name_matches
from ..model.routers import present_routers
from ..model.structure import text_part
from ..ops import is_captured, widest_float
from ..utils import replaced_method


_WRAPPERS = re.compile(
    r"\.(base_model\.model|base_layer|original_module|modules_to_save\.[^.]+|_checkpoint_wrapped_module|"
    r"_fsdp_wrapped_module)(?=\.|$)"
)
#: Where models whose routers are plain linear layers (those of other repositories) keep them.
_ROUTER_NAMES = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "feed_forward.router", "feed_forward.gate")


@dataclass(frozen=True)
class NoiseSchedule:
    """Standard deviation over training in ``stages`` equal parts (QeRL): the first is noise-free, and the others fall
    geometrically from ``start`` to ``end``; with two stages the second has ``start``, as a single one has. Raises
    `ValueError` unless ``start >= end > 0`` and ``stages >= 1``."""

    start: float = 1e-2
    end: float = 1e-3
    stages: int = 10

    def __post_init__(self):
        if not (math.isfinite(self.start) and self.start >= self.end > 0):
            raise ValueError(
                f"aqn_sigma_start={self.start} must be finite and at least aqn_sigma_end={self.end}, which must be "
                "positive"
            )
        if self.stages < 1:
            raise ValueError(f"aqn_num_stages={self.stages} must be at least 1")

    def sigma(self, step: int, max_steps: int) -> float:
        """Return the value at optimizer step ``step`` (the number of steps taken before) of ``max_steps``."""
        max_steps = max(max_steps, 1)
        if self.stages > 1 and step * self.stages < max_steps:
            return 0.0
        if self.stages <= 2:
            return self.start
        stage = min(step * self.stages // max_steps, self.stages - 1)
        return self.start * (self.end / self.start) ** ((stage - 1) / (self.stages - 2))


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without what PEFT, FSDP and checkpointing put around it."""
    return _WRAPPERS.sub("", f".{name}").removeprefix(".")


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the RMSNorm modules to put noise on, by name.

    Found by structure, whichever library defines the class: a leaf with one parameter, a 1-D ``weight``, and "norm" in
    the name of its class or of its place. In a decoder layer with a router, of the layer's own norms only
    ``input_layernorm``: the others feed the router, whose choices noise would scramble. Of a norm that PEFT trains a
    copy of (``modules_to_save``), the copy. Of a model of images or sound, the norms of its language model's decoder.
    """
    decoder = text_part(model)
    norms = {}
    for name, module in model.named_modules():
        is_of_decoder = decoder is None or module in decoder
        if is_of_decoder and not name.endswith(".original_module") and _is_norm(name, module):
            norms[name] = module
    owners = {name: plain_name(name).rpartition(".")[0] for name in norms}
    routers = _router_names(model)
    layers_with_router = {_nearest(router, set(owners.values())) for router in routers}
    noisy = {}
    for name, module in norms.items():
        feeds_router = owners[name] in layers_with_router and not name_matches(name, "input_layernorm")
        is_of_router = any(name_matches(plain_name(name), router) for router in routers)
        if not feeds_router and not is_of_router:
            noisy[name] = module
    return noisy


def _is_norm(name: str, module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or any(module.children()):
        return False
    return "norm" in type(module).__name__.lower() or "norm" in plain_name(name).rpartition(".")[2].lower()


def _router_names(model: nn.Module) -> set[str]:
    """Return the plain names of the routers of ``model``, also where routers are plain layers."""
    known = tuple(f".{router}" for router in _ROUTER_NAMES)
    names = {plain_name(name) for name, _ in model.named_modules()}
    return {name for name in names if name.endswith(known)} | {plain_name(name) for name in present_routers(model)}


def _nearest(router: str, owners: set[str]) -> str | None:
    """Return the decoder layer of a router: the nearest module around it that owns norms."""
    module = router
    while "." in module:
        module = module.rpartition(".")[0]
        if module in owners:
            return module
    return None


@dataclass(frozen=True)
class NoiseReport:
    """What noise did in one rollout.

    ``elements`` weights of ``modules`` norms deviated with standard deviation ``measured_std``; ``sigma`` was intended.
    """

    sigma: float = 0.0
    measured_std: float = 0.0
    modules: int = 0
    elements: int = 0

    @property
    def is_swallowed(self) -> bool:
        """Return whether the weights deviated by less than 90 % of what was intended, and not by chance."""
        chance = 3 / math.sqrt(2 * self.elements) if self.elements else 1.0
        return self.measured_std < (0.9 - chance) * self.sigma


class NormNoise:
    """Puts noise on the norms of one model (``norms``, see [`find_norms`]) for a rollout, by replacing their forward
    functions, and reports what it did in ``last_report``.

    Noise is a function of seed, step and module order, drawn on the CPU, so it is the same on all ranks, and global
    random state is not touched. Raises `ValueError` when the model has no norm to put noise on.
    """

    def __init__(self, model: nn.Module, seed: int):
        self.norms = find_norms(model)
        self._noisy_norms = [_NoisyNorm(module) for module in self.norms.values()]
        self.seed = seed
        self.last_report: NoiseReport | None = None
        if not self.norms:
            raise ValueError(
                f"adaptive quantization noise needs RMSNorm modules and found none in {type(model).__name__} "
                "(a module with nothing but a 1-D weight and 'norm' in its name) that feeds no router; set aqn=False"
            )

    def noise(self, index: int, weight: torch.Tensor, step: int, sigma: float) -> torch.Tensor:
        """Return the float32 noise of the ``index``-th norm at a step, on the device of its weight."""
        generator = torch.Generator().manual_seed(((self.seed * 1_000_003 + step) * 1_000_003 + index) % 2**63)
        return (torch.randn(weight.shape, generator=generator) * sigma).to(weight.device)

    @contextlib.contextmanager
    def active(self, step: int, sigma: float) -> Iterator[None]:
        """Put noise on the norms within this context. Raises `RuntimeError` at the end when ``sigma > 0`` and no norm
        ran with noise: whatever generated did not use these modules."""
        self.last_report = None
        if sigma == 0:
            yield
            self.last_report = NoiseReport()
            return
        with contextlib.ExitStack() as stack:
            for index, norm in enumerate(self._noisy_norms):
                norm.begin(functools.partial(self.noise, index, step=step, sigma=sigma))
                stack.enter_context(replaced_method(norm.module, "forward", norm.forward))
            yield
        ran = [norm for norm in self._noisy_norms if norm.has_noise]
        if not ran:
            raise RuntimeError(
                f"adaptive quantization noise (sigma={sigma:g}) reached none of {len(self.norms)} norms: "
                "generation did not run through the policy's own modules"
            )
        count = sum(norm.noise.numel() for norm in ran)
        measured = math.sqrt(sum(norm.energy for norm in ran) / count)
        self.last_report = NoiseReport(sigma, measured, len(ran), count)

    @contextlib.contextmanager
    def pushed(self, sigma: float) -> Iterator[None]:
        """Expect that weights are pushed to vLLM with the noise within this context. Raises `RuntimeError` at the end
        when none were."""
        self.last_report = NoiseReport() if sigma == 0 else None
        yield
        if self.last_report is None:
            raise RuntimeError("adaptive quantization noise did not reach vLLM: no weights were pushed")


class _NoisyNorm:
    """One norm, in one rollout after another.

    Attributes:
        noise: of the last rollout in which the norm had some. A CUDA graph that was captured with it reads it in each
            replay, so that later noise is written to the same memory.
        energy: of what it changes.
        has_noise: whether the norm has noise in this rollout: since its first forward pass, or from the beginning where
            a graph was captured, which calls no forward function.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.noise: torch.Tensor | None = None
        self.energy = 0.0
        self.has_noise = False
        self._is_in_graph = False
        self._dtypes: dict[tuple, torch.dtype] = {}

    def begin(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Begin a rollout with noise that ``draw`` draws for the norm's weight."""
        self._clean_forward = self.module.forward
        self._draw = draw
        self.has_noise = False
        if self._is_in_graph:
            self._add_noise(self.module.weight.detach().float())

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the noisy output, in the dtype of the clean forward pass, which runs once to find that out."""
        parameter = self.module.weight
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        dtypes = parameter.dtype, *(x.dtype for x in inputs)
        if dtypes not in self._dtypes:
            self._dtypes[dtypes] = self._clean_forward(*args, **kwargs).dtype
        self.module._parameters["weight"] = self._noisy(parameter)  # the parameter itself is not written
        try:
            wide = {name: _float(value) for name, value in kwargs.items()}
            output = self._clean_forward(*map(_float, args), **wide)
        finally:
            self.module._parameters["weight"] = parameter
        return output.to(self._dtypes[dtypes])

    def _noisy(self, weight: torch.Tensor) -> torch.Tensor:
        clean = weight.detach().float()
        if not self.has_noise:
            self._add_noise(clean)
        if is_captured(weight):
            self._is_in_graph = True
        return clean + self.noise

    def _add_noise(self, clean: torch.Tensor) -> None:
        """Draw the noise of a rollout for the weight, which it is measured on."""
        if clean.numel() == 0:
            raise RuntimeError(
                "a norm's weight is sharded away while the policy generates; with DeepSpeed ZeRO-3 set "
                "ds3_gather_for_generation=True"
            )
        noise = self._draw(clean)
        if self._is_in_graph:
            self.noise.copy_(noise)
        else:
            self.noise = noise
        deviation = (clean + noise) - clean
        self.energy = float(deviation.to(widest_float(deviation.device)).square().sum())
        self.has_noise = True


def _float(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return value
