# SPDX-License-Identifier: Apache-2.0
"""Options of `MXFP4GRPOConfig` that do not go with some ways to sample."""

from trl import GRPOConfig


def check_compiled_rollouts(args: GRPOConfig) -> None:
    """Raise `ValueError` where `compile_rollouts` has nothing to compile: `generate` alone compiles, and what runs in
    eager mode beside it cannot be compiled."""
    if args.use_vllm:
        raise ValueError("compile_rollouts=True compiles generation by transformers; set use_vllm=False")
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "compile_rollouts=True is for `generate`; continuous batching compiles by itself with "
            "transformers_continuous_batching_config={'default_compile_level': 1}"
        )
    if args.router_replay:
        raise ValueError(
            "router_replay=True records routers in eager mode; set compile_rollouts=False, or router_replay=False"
        )


def check_replayed_rollouts(args: GRPOConfig) -> None:
    """Raise `ValueError` for `router_replay` of rollouts that the routers of the policy's own modules do not take part
    in: they cannot be recorded."""
    if args.use_vllm and args.vllm_mode != "colocate":
        raise ValueError(
            "router_replay=True needs the experts that were chosen in the rollout, and TRL drops them from what a "
            f"server answers (vllm_mode={args.vllm_mode!r}): use vllm_mode='colocate', or router_replay=False with "
            "vllm_importance_sampling_correction=True"
        )
    if args.use_vllm and args.vllm_tensor_parallel_size > 1:
        raise ValueError(
            f"router_replay=True with vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}: vLLM returns the "
            "experts to the first of these processes alone; set vllm_tensor_parallel_size=1"
        )
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "router_replay=True records generation by `generate`; set use_transformers_continuous_batching=False"
        )
