# SPDX-License-Identifier: Apache-2.0
"""`MXFP4GRPOConfig`: TRL's `GRPOConfig` with the options of [`MXFP4GRPOTrainer`]."""

import math
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from .._logging import get_logger
from ..layers import WEIGHT_FORMS
from ..module_names import read_names
from ..suggestions import described_options
from .noise.schedule import NoiseSchedule
from .rollout.correction_options import check_correction, share_with_trl
from .rollout.options import check_compiled_rollouts, check_replayed_rollouts


#: What `step_weights` can be.
STEP_WEIGHTS = (*WEIGHT_FORMS, "none")

_NO_ENTROPY = (
    "choose 'exponential', 'linear', 'cosine' or 'constant'; use_adaptive_entropy of TRL keeps the policy entropy at a "
    "target"
)
_NO_LINEARS = "noise is on norms alone; leave the option out"
#: Options that are gone: the value that had no effect, and what to use.
_REMOVED = {
    "aqn_targets": ("norms", _NO_LINEARS),
    "aqn_linear_sigma_scale": (1.0, _NO_LINEARS),
    "aqn_target_entropy": (None, _NO_ENTROPY),
    "aqn_rate_limit": (0.05, _NO_ENTROPY),
    "gradient_gain_every": (
        0,
        "gradients are no longer compared with full precision; leave the option out (error_every measures the "
        "quantization error itself)",
    ),
}

#: What `vllm_weights` can be.
VLLM_WEIGHTS = ("packed", "dense", "checkpoint")


@described_options
@dataclass
class MXFP4GRPOConfig(GRPOConfig):
    """Options of [`MXFP4GRPOTrainer`], beside all of [`trl.GRPOConfig`]'s. Flat, so that YAML and the command line can
    set each one. Raises `ValueError` for values that mean nothing."""

    aqn: bool = field(
        default=True,
        metadata={
            "help": "Adaptive quantization noise: Gaussian noise on the weights of RMSNorms during rollouts "
            "and nowhere else. False switches all `aqn_*` options off."
        },
    )
    aqn_schedule: str = field(
        default="exponential",
        metadata={
            "help": "Standard deviation over training: 'exponential' stages (QeRL, arXiv 2605.20402), 'linear', "
            "'cosine' or 'constant', all of them noise-free in the first of `aqn_num_stages` parts of training."
        },
    )
    aqn_sigma_start: float = field(
        default=1e-2,
        metadata={"help": "Standard deviation of the noise where it sets in, absolute."},
    )
    aqn_sigma_end: float = field(
        default=1e-3,
        metadata={
            "help": "Standard deviation at the end of training: 1e-3 in arXiv 2605.20402, 1e-4 in QeRL. None "
            "under 'constant'."
        },
    )
    aqn_num_stages: int = field(
        default=10,
        metadata={
            "help": "Equal parts of training, the first of them noise-free (1: none is). Exponential noise has one "
            "standard deviation in each."
        },
    )
    aqn_layers: list[str] | None = field(
        default=None,
        metadata={
            "help": "Norms to put noise on: whole dotted name parts such as "
            "'layers.0' or 'input_layernorm', or 're:<regex on the full name>'; by default all."
        },
    )
    aqn_seed: int | None = field(default=None, metadata={"help": "Seed of the noise; by default `seed`."})
    aqn_targets: str | None = field(default=None, metadata={"help": "Removed: noise is on norms."})
    aqn_linear_sigma_scale: float | None = field(default=None, metadata={"help": "Removed with linear noise."})
    aqn_target_entropy: float | None = field(default=None, metadata={"help": "Removed with aqn_schedule='entropy'."})
    aqn_rate_limit: float | None = field(default=None, metadata={"help": "Removed with aqn_schedule='entropy'."})
    rollout_correction: bool = field(
        default=True,
        metadata={
            "help": "Importance sampling between the policy that sampled (noisy, token by token, from copies of "
            "weights, or by vLLM) and the one that trains. False measures the mismatch and leaves it."
        },
    )
    rollout_correction_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "Importance ratio of each token ('token_*') or of each sequence ('sequence_*'); where it exceeds a "
            "limit it is set to the limit ('*_truncate') or to zero ('*_mask'). As TRL's "
            "`vllm_importance_sampling_mode`."
        },
    )
    rollout_correction_cap: float = field(default=2.0, metadata={"help": "Upper limit of an importance ratio."})
    rollout_correction_min: float | None = field(
        default=None, metadata={"help": "Lower limit of an importance ratio; by default none."}
    )
    vllm_importance_sampling_correction: bool | None = field(
        default=None, metadata={"help": "TRL's name of `rollout_correction` under vLLM; by default the same."}
    )
    vllm_importance_sampling_mode: str | None = field(
        default=None,
        metadata={
            "help": "TRL's name of `rollout_correction_mode` under vLLM; by default the same. So are "
            "`vllm_importance_sampling_clip_max` and `_clip_min` of `rollout_correction_cap` and `_min`, where they "
            "are not set to other values than TRL's defaults (3.0 and none)."
        },
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Replace groups whose completions all earn the same, and so train nothing, by groups of other "
            "prompts of the training dataset (DAPO): of none that the batch has, unless there are no others."
        },
    )
    dynamic_sampling_max_rounds: int = field(
        default=3,
        metadata={
            "help": "Additional rollouts that `dynamic_sampling` may take for one batch, each of as many groups as are "
            "to be replaced. What is left then is kept, with zero advantages."
        },
    )
    overlong_buffer: int = field(
        default=0,
        metadata={
            "help": "Soft overlong punishment (DAPO): the last tokens before `max_completion_length`, over which a "
            "penalty rises from 0 to `overlong_penalty`. Added as a reward function. 0: none."
        },
    )
    overlong_penalty: float = field(
        default=1.0, metadata={"help": "Weight of the soft overlong punishment: what a truncated completion loses."}
    )
    quantize_reference: bool = field(
        default=True,
        metadata={
            "help": "With `beta` > 0: the reference policy computes under the scheme of the policy. False: in full "
            "precision, so that the divergence includes what quantization does. With adapters the reference is the "
            "policy itself without them."
        },
    )
    cache_rollout_weights: bool = field(
        default=True,
        metadata={
            "help": "Keep the quantized copy of every weight while a rollout lasts. It takes the memory of the weights "
            "in the dtype of products, in each process, under FSDP2 and ZeRO-3 too. False keeps none and quantizes (or "
            "dequantizes) every weight again for each generated token: slower, and the same to rounding. Not for "
            "vLLM's own copy."
        },
    )
    rollout_weights: str = field(
        default="auto",
        metadata={
            "help": "Form of the copies that `cache_rollout_weights` keeps of trainable weights: 'dense' in the dtype "
            "of products, 'packed' as 4-bit codes and scales, 'auto' packed where products are computed on those "
            "(GPUs with Triton, CPUs with a C++ compiler), dense elsewhere. Packed copies take about a quarter of the "
            "memory; the products are the same but for the rounding of the copy and the order of sums."
        },
    )
    step_weights: str = field(
        default="auto",
        metadata={
            "help": "What each weight was quantized to, kept from the rollout of an optimizer step to its last "
            "backward pass, so that it is quantized once per step: 'dense' in the dtype of products, 2 or 4 bytes an "
            "element; 'packed' as 4-bit codes and scales, 4.25 bits (8.56 with outlier fallback and macro blocks), "
            "from which each use makes the dense operand of one layer; 'none' quantizes again for each forward and "
            "backward pass. The same bits in all cases. 'auto' is packed where a kernel reads codes (GPUs with "
            "Triton) and dense elsewhere, but none with cache_rollout_weights=False, and under FSDP and ZeRO-3, which "
            "shard the weights."
        },
    )
    vllm_weights: str = field(
        default="packed",
        metadata={
            "help": "How a colocated vLLM keeps quantized weights: 'packed' as 4-bit codes and scales in the scheme of "
            "the policy, which weight updates send too, with room for LoRA adapters; 'dense' in the scheme of the "
            "policy and 16 bits, as it does by itself for noise on linear layers and adapters on experts; 'checkpoint' "
            "starts it on the checkpoint of the policy as it is. A server is told when it is started."
        },
    )
    compile_rollouts: bool = field(
        default=False,
        metadata={
            "help": "Generate with a static key-value cache and a compiled forward pass (torch.compile, with CUDA "
            "graphs on GPUs that have them). Costs a compilation at the start of training, one more when noise sets "
            "in, and a cache of the full length for every sequence. Not with vLLM, continuous batching, FSDP, ZeRO-3."
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
        default=50,
        metadata={
            "help": "Steps between measurements of the quantization error's components, of weights and of activations; "
            "0: never."
        },
    )
    error_layers: int = field(default=4, metadata={"help": "Number of layers decomposed, spread over the depth."})
    gradient_gain_every: int | None = field(default=None, metadata={"help": "Removed with the gradient gain."})
    movement_every: int = field(
        default=50,
        metadata={
            "help": "Steps between measurements of how far a step moves quantized weights over how far it moves their "
            "masters, on at most 16.8 M weights (64 MiB in float32); also measured in the first step that moves one "
            "and in the last; 0: never."
        },
    )
    report_every: int = field(
        default=100,
        metadata={
            "help": "Steps between versions of run_report.html in output_dir, which is written at the end of training "
            "too, also of one that fails; 0: no report."
        },
    )
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
        self._check_removed()
        self._check_noise()
        check_correction(self)
        share_with_trl(self)
        if self.dynamic_sampling_max_rounds < 1:
            raise ValueError(
                f"dynamic_sampling_max_rounds={self.dynamic_sampling_max_rounds} must be at least 1; to take none, set "
                "dynamic_sampling=False"
            )
        self._check_overlong_penalty()
        cadences = ("error_every", "movement_every", "report_every", "router_every")
        for name in ("entropy_collapse", "entropy_explosion", "error_layers", *cadences):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        self._check_weight_copies()
        self._check_vllm_weights()
        if self.router_replay:
            check_replayed_rollouts(self)
        super().__post_init__()
        by_group = self.scale_rewards in ("group", "none") and self.multi_objective_aggregation == "sum_then_normalize"
        if self.dynamic_sampling and not by_group:
            raise ValueError(
                "dynamic_sampling=True keeps advantages as they were computed within a group: use scale_rewards="
                "'group' or 'none' and multi_objective_aggregation='sum_then_normalize'"
            )
        if self.compile_rollouts:
            check_compiled_rollouts(self)

    def check_overlong_buffer(self) -> None:
        """Raise `ValueError` for an `overlong_buffer` longer than a completion may be. For who sets
        `max_completion_length` only after the config was made, too."""
        buffer, longest = self.overlong_buffer, self.max_completion_length
        if buffer and longest is not None and buffer > longest:
            raise ValueError(f"overlong_buffer={buffer} is more than max_completion_length={longest}")

    def _check_overlong_penalty(self) -> None:
        if self.overlong_buffer < 0:
            raise ValueError(f"overlong_buffer={self.overlong_buffer} must not be negative")
        if not self.overlong_penalty > 0 or not math.isfinite(self.overlong_penalty):
            raise ValueError(f"overlong_penalty={self.overlong_penalty} must be a positive number: it is subtracted")
        if not self.overlong_buffer and self._is_set("overlong_penalty"):
            # No error: who switches the buffer of a recipe off leaves its penalty in the file.
            get_logger().warning("overlong_penalty=%s has no effect without overlong_buffer", self.overlong_penalty)
        if self.overlong_buffer and self.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                "overlong_buffer adds a reward function, of which multi_objective_aggregation='normalize_then_sum' "
                "would make the same, however small the punishment: use 'sum_then_normalize', or overlong_buffer=0"
            )
        self.check_overlong_buffer()

    def _check_weight_copies(self) -> None:
        if self.step_weights not in STEP_WEIGHTS:
            raise ValueError(
                f"step_weights={self.step_weights!r} is not known; choose one of {', '.join(STEP_WEIGHTS)}"
            )
        if self.rollout_weights not in WEIGHT_FORMS:
            raise ValueError(
                f"rollout_weights={self.rollout_weights!r} is not known; choose one of {', '.join(WEIGHT_FORMS)}"
            )
        for reason, idle in (
            ("cache_rollout_weights=False, which keeps no copies", not self.cache_rollout_weights),
            ("use_vllm=True: vLLM has its own copy of the weights", self.use_vllm),
        ):
            if idle and self._is_set("rollout_weights"):
                raise ValueError(
                    f"rollout_weights={self.rollout_weights!r} has no effect with {reason}; leave rollout_weights at "
                    f"{self._default('rollout_weights')!r}"
                )

    def _check_vllm_weights(self) -> None:
        if self.vllm_weights not in VLLM_WEIGHTS:
            raise ValueError(
                f"vllm_weights={self.vllm_weights!r} is not known; choose one of {', '.join(VLLM_WEIGHTS)}"
            )
        if self._is_set("vllm_weights") and not (self.use_vllm and self.vllm_mode == "colocate"):
            raise ValueError(
                f"vllm_weights={self.vllm_weights!r} has no effect without a vLLM in this process (use_vllm=True, "
                "vllm_mode='colocate'); a server is told when it is started (docs/vllm.md)"
            )

    def _default(self, name: str) -> Any:
        return type(self).__dataclass_fields__[name].default

    def _is_set(self, name: str) -> bool:
        """Whether an option has another value than by default."""
        return getattr(self, name) != self._default(name)

    def _check_removed(self) -> None:
        for name, (inert, reason) in _REMOVED.items():
            if getattr(self, name) not in (None, inert):
                raise ValueError(f"{name}={getattr(self, name)!r} was removed: {reason}")
        if self.aqn_schedule == "entropy":
            raise ValueError(f"aqn_schedule='entropy' was removed: {_NO_ENTROPY}")

    def _check_noise(self) -> None:
        self.noise_schedule  # noqa: B018  it checks its own numbers
        constant = self.aqn and self.aqn_schedule == "constant"
        if constant and self._is_set("aqn_sigma_end") and self.aqn_sigma_end != self.aqn_sigma_start:
            raise ValueError(
                f"aqn_sigma_end={self.aqn_sigma_end} has no effect on aqn_schedule='constant', whose noise is that "
                f"of aqn_sigma_start throughout; leave aqn_sigma_end at {self._default('aqn_sigma_end')}"
            )
        read_names("aqn_layers", self.aqn_layers)

    @property
    def noise_schedule(self) -> NoiseSchedule:
        """The standard deviation over training that the `aqn_*` options describe."""
        end = self.aqn_sigma_start if self.aqn_schedule == "constant" else self.aqn_sigma_end
        return NoiseSchedule(self.aqn_sigma_start, end, self.aqn_num_stages, self.aqn_schedule)
