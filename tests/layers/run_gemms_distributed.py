# SPDX-License-Identifier: Apache-2.0
"""One of two processes that train a quantized model by DDP or FSDP2; writes what rank 0 sees. Started by a test."""

import sys

import torch
import torch.distributed as dist
from tiny_models import make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.quantizer import quantize_linears


SCHEMES = {
    "w4a4": {"preset": "w4a4"},
    "w4a4g8": {"preset": "w4a4g8"},
    "w4a4g4": {"preset": "w4a4g4"},
    "paper_b": {"preset": "paper_b"},
    "experts": {"preset": "w4a4"},
    "experts_paper_b": {"preset": "paper_b"},
    "stochastic": {"preset": "w4a4g4", "wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"}},
}


def gradients(engine: str, scheme: str) -> dict[str, torch.Tensor]:
    """Mean gradients over two halves of a batch, one per process, or one after the other without an engine."""
    model = make_model("qwen3_moe" if scheme.startswith("experts") else "llama", layers=2).train()
    quantize_linears(model, MXFP4RLConfig(**SCHEMES[scheme]))
    ids = torch.arange(2, 30).repeat(2).view(2, 1, 28) % 31
    ids[1] = ids[1].flip(-1)
    if engine == "none":
        for half in ids:
            (model(half, labels=half).loss / 2).backward()
        return {name: p.grad for name, p in model.named_parameters()}
    if engine == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    half = ids[dist.get_rank()]
    wrapped(half, labels=half).loss.backward()
    full = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return {name: grad.clone() for name, grad in full.items()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {(e, s): gradients(e, s) for e in ("ddp", "fsdp2") for s in SCHEMES}
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[1])
    dist.destroy_process_group()
