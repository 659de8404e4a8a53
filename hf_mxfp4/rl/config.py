# SPDX-License-Identifier: Apache-2.0
"""`MXFP4GRPOConfig`: TRL's `GRPOConfig` with the options of [`MXFP4GRPOTrainer`]."""

import math
from dataclasses import dataclass, field

from trl import GRPOConfig

from .aqn import NoiseSchedule


@dataclass
class MXFP4GRPOConfig(GRPOConfig):
    """Options of [`MXFP4GRPOTrainer`], beside all of [`trl.GRPOConfig`]'s. Flat, so that YAML and the command line can
    set each one. Raises `ValueError` for values that mean nothing."""

    aqn: bool = field(
        default=True,
        metadata={"help": "Adaptive quantization noise: Gaussian noise on the RMSNorm weights during rollouts."},
    )
    aqn_sigma_start: float = field(
        default=1e-2, metadata={"help": "Standard deviation of the noise in the first noisy stage (absolute)."}
    )
    aqn_sigma_end: float = field(
        default=1e-3, metadata={"help": "Standard deviation in the last stage: 1e-3 in arXiv 2605.20402, 1e-4 in QeRL."}
    )
    aqn_num_stages: int = field(
        default=10,
        metadata={"help": "Equal parts of training with one standard deviation each; the first one is noise-free."},
    )
    aqn_seed: int | None = field(default=None, metadata={"help": "Seed of the noise; by default `seed`."})
    rollout_correction: bool = field(
        default=True,
        metadata={
            "help": "Truncated importance sampling between the noisy policy that sampled and the clean one that "
            "trains, for rollouts by transformers (with vLLM, TRL's own `vllm_importance_sampling_correction` does it)."
        },
    )
    rollout_correction_cap: float = field(
        default=2.0, metadata={"help": "Upper limit of the importance ratio of a token."}
    )
    cache_rollout_weights: bool = field(
        default=True,
        metadata={
            "help": "Keep the quantized copy of every weight while a rollout lasts. It takes the memory of the weights "
            "in the dtype of products, in each process, under FSDP2 and ZeRO-3 too. False keeps none and quantizes (or "
            "dequantizes) every weight again for each generated token: slower, same bits. Not for vLLM's own copy."
        },
    )
    entropy_collapse: float = field(
        default=0.05, metadata={"help": "Alarm when the policy entropy (nats per token) falls below this; 0: never."}
    )
    entropy_explosion: float = field(
        default=2.0,
        metadata={"help": "Alarm when the policy entropy exceeds this multiple of its value at the start; 0: never."},
    )
    error_every: int = field(
        default=50, metadata={"help": "Steps between decompositions of the weights' quantization error; 0: never."}
    )
    error_layers: int = field(default=4, metadata={"help": "Number of layers decomposed, spread over the depth."})
    router_every: int = field(
        default=0,
        metadata={
            "help": "Mixture of experts: steps between measurements of the routing, against full precision and of the "
            "experts' load, on the last training batch; 0: never."
        },
    )
    router_replay: bool = field(
        default=False,
        metadata={
            "help": "Mixture of experts: train with the experts that were chosen in the rollout (R3, arXiv 2510.11370)."
        },
    )
    allow_full_precision: bool = field(
        default=False,
        metadata={"help": "Train a model without any MXFP4 layer, for a baseline. Otherwise such a model is refused."},
    )

    def __post_init__(self):
        # NoiseSchedule checks its own numbers.
        self.noise_schedule  # noqa: B018
        if not self.rollout_correction_cap > 0 or not math.isfinite(self.rollout_correction_cap):
            raise ValueError(f"rollout_correction_cap={self.rollout_correction_cap} must be a positive number")
        for name in ("entropy_collapse", "entropy_explosion", "error_every", "error_layers", "router_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.router_replay:
            self._check_router_replay()
        super().__post_init__()

    def _check_router_replay(self) -> None:
        """Rollouts that the routers of the policy's own modules do not take part in cannot be recorded."""
        if self.use_vllm:
            raise ValueError(
                "router_replay=True needs the experts that were chosen in the rollout, which vLLM does not return; use "
                "use_vllm=False, or router_replay=False with vllm_importance_sampling_correction=True"
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "router_replay=True records generation by `generate`; set use_transformers_continuous_batching=False"
            )

    @property
    def noise_schedule(self) -> NoiseSchedule:
        """The schedule that the `aqn_*` options describe."""
        return NoiseSchedule(self.aqn_sigma_start, self.aqn_sigma_end, self.aqn_num_stages)
