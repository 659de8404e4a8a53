# SPDX-License-Identifier: Apache-2.0
"""One of two processes that train a quantized model by DDP or FSDP2: ``FILE SCHEME ...``; writes what rank 0 sees.
Started by a test."""

import sys

import torch
import torch.distributed as dist
from tiny_models import make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.presets import PRESETS


#: Name -> options; names that start with "experts" are of a mixture of experts.
SCHEMES = {
    **{preset: {"preset": preset} for preset in PRESETS},
    **{f"experts_{preset}": {"preset": preset} for preset in PRESETS},
    "saved_mxfp4": {"saved_activations": "mxfp4"},
    "saved_fp8": {"preset": "w4a4g4", "saved_activations": "fp8"},
    "experts_saved_mxfp4": {"saved_activations": "mxfp4"},
    "stochastic": {"preset": "w4a4g4", "wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"}},
}
STEPS = 5


def train(engine: str, scheme: str) -> dict:
    """The gradients of the first step and the losses of all, over two halves of a batch, one per process, or one after
    the other without an engine."""
    model = make_model("qwen3_moe" if scheme.startswith("experts") else "llama", layers=2).train()
    quantize_linears(model, MXFP4RLConfig(**SCHEMES[scheme]))
    ids = torch.arange(2, 30).repeat(2).view(2, 1, 28) % 31
    ids[1] = ids[1].flip(-1)
    wrapped, halves = wrap(model, engine), ids if engine == "none" else ids[dist.get_rank()][None]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.3)
    gradients, losses = {}, []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for half in halves:
            part = wrapped(half, labels=half).loss / len(halves)
            part.backward()
            loss += part.detach()
        if engine != "none":
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
        if step == 0:
            full = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
            gradients = {name: grad.clone() for name, grad in full.items()}
        optimizer.step()
    return {"gradients": gradients, "losses": losses}


def wrap(model: torch.nn.Module, engine: str) -> torch.nn.Module:
    if engine == "none":
        return model
    if engine == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {(e, s): train(e, s) for e in ("ddp", "fsdp2") for s in sys.argv[2:]}
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[1])
    # A process that leaves before the other has ended, and with its group open, can be aborted at its exit.
    dist.barrier()
    dist.destroy_process_group()
