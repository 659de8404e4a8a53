# SPDX-License-Identifier: Apache-2.0
"""What the tests add to the worker of a vLLM server, named to it by `--worker-extension-cls`: importing this module
makes its layers as [`harness`] does, and registers a weight transfer that needs no CUDA."""

import itertools

import harness
import torch
from safetensors.torch import save_file
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


#: Tensors that are given to the model at once: the packed broadcasts of NCCL have as many as fit into a buffer.
_AT_ONCE = 3


class StoreWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with a TCP store in the place of NCCL: what begins and ends an update is NCCL's."""

    def init_transfer_engine(self, init_info):
        self.group = StatelessProcessGroup.create(
            init_info.master_address,
            init_info.master_port,
            self.parallel_config.rank + init_info.rank_offset,
            init_info.world_size,
        )

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        expected = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        while batch := list(itertools.islice(expected, _AT_ONCE)):
            self.model.load_weights([(name, self._receive(dtype, shape)) for name, dtype, shape in batch])

    def _receive(self, dtype: str, shape: list[int]) -> torch.Tensor:
        tensor = self.group.broadcast_obj(None, src=0)
        if (str(tensor.dtype), list(tensor.shape)) != (f"torch.{dtype}", shape):
            raise ValueError(f"announced {dtype} {shape}, sent {tensor.dtype} {list(tensor.shape)}")
        return tensor

    def shutdown(self):
        self.group = None


WeightTransferEngineFactory.register_engine("store", StoreWeightTransferEngine)


class Extension:
    """Methods of the worker, for the server's `/collective_rpc`."""

    def save_served_weights(self, path: str) -> None:
        """Write the weights of the model as they are now, by the names that transformers has for them."""
        served = harness.served_weights(self.model_runner.get_model())
        save_file({name: tensor.contiguous() for name, tensor in served.items()}, path)
