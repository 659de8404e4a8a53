# SPDX-License-Identifier: Apache-2.0
"""Adaptive quantization noise (AQN): Gaussian noise on RMSNorm weights while the policy samples.

Noise ``Z`` on a norm's weight is multiplicative noise on the input channels of the linear layers behind it (QeRL, arXiv
2510.11696, section 3.3; used for MXFP4 in arXiv 2605.20402). It is applied in the norm's forward pass, in float32, and
nowhere else: the weight is not written, so there is nothing to restore, and bfloat16 weights do not swallow small
noise.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...backends.devices import widest_float
from ...gemm import autocast_dtype
from ...model_structure import text_part
from ...module_names import name_matches
from ...moe import present_routers
from .targets import chosen_names, plain_name


#: Where models whose routers are plain linear layers (those of other repositories) keep them.
_ROUTER_NAMES = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "feed_forward.router", "feed_forward.gate")


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The RMSNorm modules to put noise on, by name.

    Found by structure, whichever library defines the class: a leaf with one parameter, a 1-D ``weight``, and "norm" in
    the name of its class or of its place. In a decoder layer with a router, of the layer's own norms only
    ``input_layernorm`` is taken: the others feed the router, whose choices noise would scramble. Of a norm that PEFT
    trains a copy of (``modules_to_save``), the copy is taken. Of a model of images or sound, the norms of its language
    model's decoder are.
    """
    norms = {}
    routers, decoder = router_names(model), text_part(model)
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or any(module.children()):
            continue
        if decoder is not None and module not in decoder:
            continue
        place = plain_name(name).rpartition(".")[2]
        if "norm" not in type(module).__name__.lower() and "norm" not in place.lower():
            continue
        if not name.endswith(".original_module"):
            norms[name] = module
    owners = {_owner(name) for name in norms}
    routed = {_nearest(router, owners) for router in routers}
    return {
        name: module
        for name, module in norms.items()
        if (_owner(name) not in routed or name_matches(name, "input_layernorm"))
        and not any(name_matches(plain_name(name), router) for router in routers)
    }


def router_names(model: nn.Module) -> set[str]:
    """The plain names of the routers of ``model``, of other repositories' too, whose routers are plain layers."""
    known = tuple(f".{router}" for router in _ROUTER_NAMES)
    by_name = {plain_name(name) for name, _ in model.named_modules() if plain_name(name).endswith(known)}
    return by_name | {plain_name(name) for name in present_routers(model)}


def _owner(name: str) -> str:
    """The module that a norm is a part of."""
    return plain_name(name).rpartition(".")[0]


def _nearest(router: str, owners: set[str]) -> str | None:
    """The decoder layer of a router: of the modules around it, the nearest that owns norms."""
    around = router.split(".")[:-1]
    prefixes = (".".join(around[:count]) for count in range(len(around), 0, -1))
    return next((prefix for prefix in prefixes if prefix in owners), None)


@dataclass(frozen=True)
class NoiseReport:
    """What noise really did in one rollout: ``modules`` layers ran with it, and their weights, ``elements`` in number,
    deviated from the clean ones with standard deviation ``measured_std``, where ``sigma`` was intended: absolute for
    norms, relative to the root mean square of each weight matrix for linear layers."""

    sigma: float
    measured_std: float
    modules: int
    elements: int = 0

    @property
    def is_swallowed(self) -> bool:
        """Whether the weights deviated by less than 90 % of what was intended, and not by chance."""
        chance = 3 / math.sqrt(2 * self.elements) if self.elements else 1.0
        return self.measured_std < (0.9 - chance) * self.sigma


class NormNoise:
    """Puts noise on the norms of one model.

    Args:
        model: the policy, possibly wrapped by PEFT; the forward passes of its norms are replaced for a rollout, which
            DDP and FSDP2 allow.
        seed: base seed. Noise is a function of seed, step and module order, drawn on the CPU, so it is the same on
            all ranks, and global random state is not touched.
        compiled: whether compiled code of the model runs, too. Such code does not notice hooks that come and go: they
            stay on for good, idle outside of [`active`], and noise is drawn where that begins, for which weights must
            be whole. The code takes noise as an input, so that one graph serves all rollouts, and another one all
            those without noise.
        layers: the norms to choose, see [`chosen_names`]; by default all.

    Raises `ValueError` when the model has no norm to put noise on, or none is chosen.
    """

    def __init__(self, model: nn.Module, seed: int, compiled: bool = False, layers: Sequence[str] | None = None):
        norms = find_norms(model)
        self.norms = {name: norms[name] for name in chosen_names(norms, layers)}
        # Among all norms, so that a norm's noise is the same whether others are chosen or not.
        self._places = [place for place, name in enumerate(norms) if name in self.norms]
        self.seed = seed
        self.compiled = compiled
        self.last_report: NoiseReport | None = None
        if norms and not self.norms:
            raise ValueError(
                f"aqn_layers={list(layers)} chooses none of the {len(norms)} norms that noise can be put on, such as "
                f"{next(iter(norms))}"
            )
        if not norms:
            raise ValueError(
                f"adaptive quantization noise found no RMSNorm in {type(model).__name__} "
                "(a module with nothing but a 1-D weight and 'norm' in its name) that feeds no router; set aqn=False"
            )
        self._hooks = [_NormHook() for _ in self.norms]
        if compiled:
            for module, hook in zip(self.norms.values(), self._hooks, strict=True):
                module.register_forward_hook(hook, with_kwargs=True)

    def noise(self, index: int, weight: torch.Tensor, step: int, sigma: float) -> torch.Tensor:
        """The float32 noise of the ``index``-th norm at a step, on the device of its weight."""
        place = self._places[index]
        generator = torch.Generator().manual_seed(((self.seed * 1_000_003 + step) * 1_000_003 + place) % 2**63)
        return (torch.randn(weight.shape, generator=generator) * sigma).to(weight.device)

    @contextlib.contextmanager
    def active(self, step: int, sigma: float) -> Iterator[None]:
        """Noise at this step for as long as the context lasts, gone after it even when it ends by an exception.

        Raises `RuntimeError` at the end when ``sigma > 0`` and no norm ran with noise: whatever generated did not use
        these modules.
        """
        self.last_report = None
        if sigma == 0:
            yield
            self.last_report = NoiseReport(0.0, 0.0, 0)
            return
        with contextlib.ExitStack() as stack:
            for index, (hook, module) in enumerate(zip(self._hooks, self.norms.values(), strict=True)):
                hook.start(functools.partial(self.noise, index, step=step, sigma=sigma))
                stack.callback(hook.stop)
                if self.compiled:
                    hook.prepare(module.weight.detach().float())
                else:
                    forward = functools.partial(hook.forward, module, module.forward)
                    stack.enter_context(replaced_method(module, "forward", forward))
            yield
            deviations = [hook.deviation for hook in self._hooks if hook.ran]
        if not deviations:
            raise RuntimeError(
                f"adaptive quantization noise (sigma={sigma:g}) reached none of {len(self.norms)} norms: "
                "generation did not run through the policy's own modules"
            )
        energy, count = (sum(column) for column in zip(*deviations, strict=True))
        self.last_report = NoiseReport(sigma, math.sqrt(energy / count), len(deviations), count)


class _NormHook:
    """The noise of one norm: its forward pass, or in code that is compiled a hook after it.

    Attributes:
        on: whether the norm's forward pass adds noise to its weight.
        noise: once it is drawn.
        ran: whether a forward pass has added it.
        deviation: what it does to the weight: sum of squares, and their number.
    """

    def __init__(self):
        self.stop()

    def start(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add the noise that ``draw`` gives for the weight."""
        self.on, self._draw = True, draw

    def stop(self) -> None:
        self.on = self.ran = False
        self.noise = self._draw = None
        self.deviation = 0.0, 0
        self._dtypes: dict[tuple, torch.dtype] = {}
        self._noisy_weight: tuple[torch.Tensor, torch.Tensor] | None = None

    def prepare(self, clean: torch.Tensor) -> None:
        """Draw the noise for this weight, in float32."""
        if clean.numel() == 0:
            raise RuntimeError(
                "a norm's weight is sharded away while the policy generates; with DeepSpeed ZeRO-3 set "
                "ds3_gather_for_generation=True"
            )
        self.noise = self._draw(clean)
        deviation = (clean + self.noise) - clean
        exact = deviation.to(widest_float(deviation.device))
        self.deviation = float(exact.square().sum()), deviation.numel()

    def forward(self, module: nn.Module, clean: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The noisy output of the norm, in the dtype of the ``clean`` forward pass, which runs once for each kind of
        input to find that out."""
        inputs = (*args, *kwargs.values())
        kind = module.weight.dtype, *((x.dtype, autocast_dtype(x)) for x in inputs if isinstance(x, torch.Tensor))
        dtype = self._dtypes.get(kind)
        if dtype is None:
            dtype = self._dtypes[kind] = clean(*args, **kwargs).dtype
        weight = module.weight
        if self._noisy_weight is None or self._noisy_weight[0] is not weight:
            self._noisy_weight = weight, self._noisy(weight)
        noisy = self._noisy_weight[1]
        self.ran = True
        with _weight_replaced(module, noisy):
            return clean(*(_float(value) for value in args), **kwargs).to(dtype)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor | None:
        # Traced by the compiler, which leaves out the clean product, since all that is read of it is its dtype. What it
        # reads here is checked before each run of what it made.
        if not self.on:
            return None
        noisy = self._noisy(module.weight)
        self.ran = True
        with _weight_replaced(module, noisy):
            noisy = module.forward(*(_float(value) for value in args), **kwargs)
        return noisy.to(output.dtype)

    def _noisy(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight with noise, in float32."""
        clean = weight.detach().float()
        if self.noise is None:
            self.prepare(clean)
        return clean + self.noise


@contextlib.contextmanager
def replaced_method(module: nn.Module, method: str, replacement: Callable) -> Iterator[None]:
    """A method of one module replaced; back even after an exception."""
    own = module.__dict__.get(method)
    setattr(module, method, replacement)
    try:
        yield
    finally:
        delattr(module, method)
        if own is not None:
            setattr(module, method, own)


@contextlib.contextmanager
def _weight_replaced(module: nn.Module, weight: torch.Tensor) -> Iterator[None]:
    """The module computes with another tensor in place of its parameter, which is not written."""
    parameter = module._parameters["weight"]
    module._parameters["weight"] = weight
    try:
        yield
    finally:
        module._parameters["weight"] = parameter


def _float(value: object) -> object:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
