# SPDX-License-Identifier: Apache-2.0
"""`MXFP4AsyncGRPOTrainer`: TRL's asynchronous GRPO, whose vLLM server samples from what the policy computes with."""

import json
from types import SimpleNamespace
from typing import Any

from accelerate.utils import is_peft_model
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from .._logging import get_logger
from ..integrations.vllm import SETTINGS_KEY
from ..layers import QUANTIZED, random_layers
from .callbacks.quantization_step import QuantizationStepCallback
from .config import check_policy, check_scheme, count_quantized
from .vllm import Parameters, rollout_parameters
from .vllm_engine import VLLMEngine, check_forward, check_served


class MXFP4AsyncGRPOTrainer(AsyncGRPOTrainer):
    """[`trl.experimental.async_grpo.AsyncGRPOTrainer`] for quantized policies: ``Q(W)`` is pushed in the place of
    master weights, by the same names, and a server that would sample from something else than what trains is refused.

    Of [`MXFP4GRPOTrainer`] it has nothing else: no noise, correction options, router replay or checkpoints of its own.
    Adapters (`peft_config`) are pushed alone, to a server with `--enable-lora` that serves the policy's own scheme.
    ``quantization_config`` is an `MXFP4RLConfig`, unless the folder of ``model`` has one; `n_quantized` is the number
    of weight matrices in MXFP4.

    Raises:
        ValueError: the model has no MXFP4 layer, its forward scheme is none that weights can express, or adapters would
            have to be merged; and when training begins, for a server that quantizes otherwise than the policy does.
        TypeError: `quantization_config` is the name of a scheme.
    """

    _tag_names = ["trl", "async-grpo", "mxfp4", "hf-mxfp4"]

    def __init__(
        self,
        model: str,
        reward_funcs: Any = None,
        args: AsyncGRPOConfig | None = None,
        *,
        quantization_config: Any = None,
        **kwargs: Any,
    ):
        check_scheme("quantization_config", quantization_config)
        if args is None:
            args = AsyncGRPOConfig(f"{model.split('/')[-1]}-AsyncGRPO")
        model_init_kwargs = args.model_init_kwargs
        if quantization_config is not None:
            args.model_init_kwargs = {**(model_init_kwargs or {}), "quantization_config": quantization_config}
        try:
            super().__init__(model, reward_funcs, args, **kwargs)
        finally:
            args.model_init_kwargs = model_init_kwargs
        policy = self.accelerator.unwrap_model(self.model)
        self.n_quantized = count_quantized(policy)
        check_policy(policy, self.n_quantized, otherwise="use trl's AsyncGRPOTrainer")
        check_forward(policy)
        if is_peft_model(policy) and not self._lora_sync:
            raise ValueError(
                "AsyncGRPOTrainer merges adapters into the weights below them where it cannot push them alone, which "
                "writes master weights and fails on packed ones; start vLLM on the policy's own folder with "
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and leave out weight_transfer"
            )
        if not self._lora_sync:
            check_served(policy)
        # A transfer that is given to the trainer may be to anything.
        self._is_server_asked = kwargs.get("weight_transfer") is None
        if not self._is_server_asked:
            get_logger().info("weight_transfer is given: what samples is not asked what it computes with")
        if random_layers(policy):
            self.add_callback(QuantizationStepCallback())
        get_logger().info("MXFP4AsyncGRPOTrainer: n_quantized=%d", self.n_quantized)

    def _sync_weight(self) -> None:
        if self._is_server_asked:
            self._is_server_asked = False
            self._check_server()
        super()._sync_weight()

    def _streaming_iter(self) -> Parameters:
        yield from rollout_parameters(super()._streaming_iter(), self.accelerator.unwrap_model(self.model))

    def _check_server(self) -> None:
        """Raise `ValueError` unless the server computes as the policy does, with what is pushed to it."""
        policy = self.accelerator.unwrap_model(self.model)
        engine = VLLMEngine.of(SimpleNamespace(mode="server", vllm_client=self.vllm_client, model=policy))
        own = next(module.config for module in policy.modules() if isinstance(module, QUANTIZED))
        report = getattr(policy, "quantization_report", None)
        reason = None
        if not engine.quantizes_as(policy):
            reason = f"quantizes inputs of layers as {engine.inputs}, and the policy as {own.activation_scheme}"
        elif self._lora_sync and (engine.scheme is None or engine.scheme.weight_scheme != own.weight_scheme):
            reason = "does not have the weights that adapters are trained on, and adapters alone are pushed"
        elif self._lora_sync and getattr(report, "smoothing", None) is not None:
            reason = (
                "does not have the weights that were smoothed as the policy was loaded, and adapters alone are pushed "
                "(load the policy from the folder too, or with smooth=False)"
            )
        elif not self._lora_sync and engine.is_packed:
            reason = "keeps weights in 4 bits, and would quantize what is pushed to it a second time"
        if reason:
            also = ""
            if not self._lora_sync:
                settings = json.dumps({SETTINGS_KEY: {"weights": "dense"}})
                also = f", with {settings} inside of its quantization_config"
            raise ValueError(
                f"the vLLM server at {self.args.vllm_server_base_url} {reason}: start it on a folder that the policy "
                f"was saved in{also} (docs/vllm.md)"
            )
