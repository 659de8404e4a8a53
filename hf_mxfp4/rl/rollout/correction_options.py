# SPDX-License-Identifier: Apache-2.0
"""The options of the importance weights: ours, and those that TRL has for rollouts by vLLM, which are to agree."""

import math
from typing import Any

from .mismatch import CORRECTION_MODES


#: Ours, by TRL's. Each of TRL's that was not given takes the value of ours.
_SAME = {
    "vllm_importance_sampling_mode": "rollout_correction_mode",
    "vllm_importance_sampling_clip_max": "rollout_correction_cap",
    "vllm_importance_sampling_clip_min": "rollout_correction_min",
}


def check_correction(args: Any) -> None:
    """Refuse values of `rollout_correction*` that mean nothing, by `ValueError`."""
    mode, cap, minimum = args.rollout_correction_mode, args.rollout_correction_cap, args.rollout_correction_min
    if mode not in CORRECTION_MODES:
        raise ValueError(f"rollout_correction_mode={mode!r} is not known; choose one of {', '.join(CORRECTION_MODES)}")
    if not cap > 0 or not math.isfinite(cap):
        raise ValueError(f"rollout_correction_cap={cap} must be a positive number")
    if minimum is not None and not 0 <= minimum < cap:
        raise ValueError(f"rollout_correction_min={minimum} must lie between 0 and rollout_correction_cap={cap}")
    if args.rollout_correction and args.loss_type == "vespo" and mode.startswith("sequence"):
        raise ValueError(
            "loss_type='vespo' multiplies the ratios of a sequence's tokens itself: use rollout_correction_mode="
            "'token_truncate' or 'token_mask'"
        )


def share_with_trl(args: Any) -> None:
    """Give TRL's options for vLLM the values of ours, where they were not given themselves.

    Of two that differ, the one that is not at its default counts. To share again, as a config does that is made from
    another one, changes nothing.

    Raises `ValueError` under `use_vllm` where both are given and differ, and for a mode that is not known.
    """
    if args.vllm_importance_sampling_cap is not None:  # the old name of the upper limit, which TRL still reads
        args.vllm_importance_sampling_clip_max = args.vllm_importance_sampling_cap
    ours, theirs = args.rollout_correction, args.vllm_importance_sampling_correction
    if theirs is None:
        args.vllm_importance_sampling_correction = ours
    elif args.use_vllm and theirs and not ours:
        raise ValueError(
            "rollout_correction=False and vllm_importance_sampling_correction=True contradict each other: for no "
            "importance weights leave vllm_importance_sampling_correction out; for TRL's leave rollout_correction out"
        )
    for name, own in _SAME.items():
        value = getattr(args, own)
        if not _is_set(args, name):
            setattr(args, name, value)
        elif args.use_vllm and _is_set(args, own) and getattr(args, name) != value:
            raise ValueError(
                f"{own}={value!r} and {name}={getattr(args, name)!r} are the same option under use_vllm=True; set one "
                "of them"
            )
    if args.vllm_importance_sampling_mode not in CORRECTION_MODES:
        raise ValueError(
            f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} is not known; choose one of "
            f"{', '.join(CORRECTION_MODES)}"
        )


def limits_in_force(args: Any) -> tuple[str, float | None, float | None] | None:
    """Mode, upper and lower limit of the importance weights of a rollout; `None` where none are applied."""
    if not args.use_vllm:
        limits = args.rollout_correction_mode, args.rollout_correction_cap, args.rollout_correction_min
        return limits if args.rollout_correction else None
    if not args.vllm_importance_sampling_correction:
        return None
    return tuple(getattr(args, name) for name in _SAME)


def _is_set(args: Any, name: str) -> bool:
    """Whether an option was given, as far as it can be told from its value."""
    return getattr(args, name) != type(args).__dataclass_fields__[name].default
