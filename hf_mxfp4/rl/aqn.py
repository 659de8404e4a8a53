# SPDX-License-Identifier: Apache-2.0
"""Adaptive quantization noise (AQN): Gaussian noise on RMSNorm weights while the policy samples.

Noise ``Z`` on a norm's weight is multiplicative noise on the input channels of the linear layers behind it (QeRL, arXiv
2510.11696, section 3.3; used for MXFP4 in arXiv 2605.20402). It is applied in the norm's forward pass, in float32, and
nowhere else: the weight is not written, so there is nothing to restore, and bfloat16 weights do not swallow small
noise.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..module_names import name_matches
from ..routing import present_routers


#: Where models whose routers are plain linear layers (those of other repositories) keep them.
_ROUTER_NAMES = ("mlp.gate", "mlp.router", "block_sparse_moe.gate", "feed_forward.router", "feed_forward.gate")


@dataclass(frozen=True)
class NoiseSchedule:
    """Standard deviation over training: ``stages`` equal parts, the first noise-free, then geometric from ``start`` to
    ``end``. With two stages the second has ``start``; a single stage is noisy throughout, at ``start``.

    Raises `ValueError` unless ``start >= end > 0`` and ``stages >= 1``.
    """

    start: float = 1e-2
    end: float = 1e-3
    stages: int = 10

    def __post_init__(self):
        if not (math.isfinite(self.start) and self.start >= self.end > 0):
            raise ValueError(
                f"aqn_sigma_start={self.start} must be finite and at least aqn_sigma_end={self.end}, "
                "which must be positive"
            )
        if self.stages < 1:
            raise ValueError(f"aqn_num_stages={self.stages} must be at least 1")

    def sigma(self, step: int, max_steps: int) -> float:
        """The value at optimizer step ``step`` of ``max_steps``: a function of these two numbers alone, so that epochs
        and resumed runs follow the same curve. Steps past the end have the last stage's value."""
        if self.stages == 1:
            return self.start
        stage = min(step * self.stages // max(max_steps, 1), self.stages - 1)
        if stage == 0:
            return 0.0
        if self.stages == 2:
            return self.start
        return self.start * (self.end / self.start) ** ((stage - 1) / (self.stages - 2))


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The RMSNorm modules to put noise on, by name.

    Found by structure, whichever library defines the class: a leaf with one parameter, a 1-D ``weight``, and "norm" in
    the name of its class or of its place. In a decoder layer with a router, of the layer's own norms only
    ``input_layernorm`` is taken: the others feed the router, whose choices noise would scramble. Of a norm that PEFT
    trains a copy of (``modules_to_save``), the copy is taken.
    """
    norms = {}
    routers = {plain_name(name) for name in present_routers(model)}
    for name, module in model.named_modules():
        if plain_name(name).endswith(tuple(f".{router}" for router in _ROUTER_NAMES)):
            routers.add(plain_name(name))
        parameters = dict(module.named_parameters(recurse=False))
        if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or any(module.children()):
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


def _owner(name: str) -> str:
    """The module that a norm is a part of."""
    return plain_name(name).rpartition(".")[0]


def _nearest(router: str, owners: set[str]) -> str | None:
    """The decoder layer of a router: of the modules around it, the nearest that owns norms."""
    around = router.split(".")[:-1]
    prefixes = (".".join(around[:count]) for count in range(len(around), 0, -1))
    return next((prefix for prefix in prefixes if prefix in owners), None)


def plain_name(name: str) -> str:
    """A module's name without the wrappers that PEFT puts around models, layers and modules to save."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "").removesuffix(".original_module")
    return name.split(".modules_to_save.")[0]


@dataclass(frozen=True)
class NoiseReport:
    """What noise really did in one rollout: ``modules`` norms ran with it, and their weights deviated from the clean
    ones with standard deviation ``measured_std``, where ``sigma`` was intended."""

    sigma: float
    measured_std: float
    modules: int


class NormNoise:
    """Puts noise on the norms of one model.

    Args:
        model: the policy, possibly wrapped by PEFT; hooks go on its modules and survive DDP and FSDP2.
        seed: base seed. Noise is a function of seed, step and module order, drawn on the CPU, so it is the same on
            all ranks, and global random state is not touched.

    Raises `ValueError` when the model has no norm to put noise on.
    """

    def __init__(self, model: nn.Module, seed: int):
        self.norms = find_norms(model)
        self.seed = seed
        self.last_report: NoiseReport | None = None
        if not self.norms:
            raise ValueError(
                f"adaptive quantization noise found no RMSNorm in {type(model).__name__} "
                "(a module with nothing but a 1-D weight and 'norm' in its name); set aqn=False"
            )

    def noise(self, index: int, weight: torch.Tensor, step: int, sigma: float) -> torch.Tensor:
        """The float32 noise of the ``index``-th norm at a step, on the device of its weight."""
        generator = torch.Generator().manual_seed(((self.seed * 1_000_003 + step) * 1_000_003 + index) % 2**63)
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
        deviations: dict[int, tuple[float, int]] = {}
        noises: dict[int, torch.Tensor] = {}
        handles = []
        try:
            for index, module in enumerate(self.norms.values()):
                hook = self._hook(index, step, sigma, noises, deviations)
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
        if not deviations:
            raise RuntimeError(
                f"adaptive quantization noise (sigma={sigma:g}) reached none of {len(self.norms)} norms: "
                "generation did not run through the policy's own modules"
            )
        energy, count = (sum(column) for column in zip(*deviations.values(), strict=True))
        self.last_report = NoiseReport(sigma, math.sqrt(energy / count), len(deviations))

    def _hook(self, index: int, step: int, sigma: float, noises: dict, deviations: dict):
        def run_with_noise(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> torch.Tensor:
            clean = module.weight.detach().float()
            if clean.numel() == 0:
                raise RuntimeError(
                    "a norm's weight is sharded away while the policy generates; with DeepSpeed ZeRO-3 set "
                    "ds3_gather_for_generation=True"
                )
            if index not in noises:
                noises[index] = self.noise(index, clean, step, sigma)
                deviation = (clean + noises[index]) - clean
                deviations[index] = (float(deviation.double().square().sum()), deviation.numel())
            with _weight_replaced(module, clean + noises[index]):
                noisy = module.forward(*(_float(value) for value in args), **kwargs)
            return noisy.to(output.dtype)

        return run_with_noise


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
