# SPDX-License-Identifier: Apache-2.0
"""Schemes under DDP and FSDP2 with two processes on the CPU, dense and with experts, against one process.

As a script, ``FILE``, it is one of the two processes, and writes what rank 0 sees.
"""

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from processes import run, script
from tiny_models import make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers import quantize_linears


#: Name -> options, with each rule of what is saved, multiplied and drawn; names that start with "experts" are of a
#: mixture of experts.
SCHEMES = {
    "w4a8g8": {"preset": "w4a8g8"},
    "w4a4g4": {"preset": "w4a4g4"},
    "experts": {},
    "experts_paper_b": {"preset": "paper_b"},
    "stochastic": {"preset": "w4a4g4", "wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"}},
}
STEPS = 3


def train(engine: str, scheme: str) -> dict:
    """The gradients of the first step and the losses of all, over two halves of a batch, one per process, or one after
    the other without an engine."""
    model = make_model("qwen3_moe" if scheme.startswith("experts") else "llama", layers=2).train()
    quantize_linears(model, MXFP4RLConfig(**SCHEMES[scheme]))
    ids = torch.arange(2, 30).repeat(2).view(2, 1, 28) % 31
    ids[1] = ids[1].flip(-1)
    wrapped = wrap(model, engine)
    halves = ids if engine == "none" else ids[dist.get_rank()][None]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.3)
    gradients = {}
    losses = []
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


@pytest.fixture(scope="module")
def distributed(tmp_path_factory) -> dict:
    """What two processes saw that trained: engine and scheme -> gradients and losses."""
    out = tmp_path_factory.mktemp("gemms") / "results.pt"
    done = run(script(__file__, out), ranks=2)
    assert done.returncode == 0, done.output[-3000:]
    return torch.load(out)


@functools.cache
def alone(scheme: str) -> dict:
    return train("none", scheme)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "stochastic"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_training_is_that_of_one_process(distributed, engine, scheme):
    expected = alone(scheme)
    found = distributed[engine, scheme]
    torch.testing.assert_close(found["gradients"], expected["gradients"], rtol=1e-4, atol=1e-6)
    # Sums in another order can move a value over the edge between two codes, later steps more than the first.
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5)
    assert expected["losses"][-1] < expected["losses"][0] - 0.05


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_random_numbers_differ_by_rank_and_do_not_harm(distributed, engine):
    name = "model.layers.1.mlp.up_proj.weight"
    found = distributed[engine, "stochastic"]["gradients"][name]
    expected, exact = (alone(scheme)["gradients"][name] for scheme in ("stochastic", "w4a4g4"))
    assert not torch.equal(found, expected)
    assert (found - exact).norm() < 0.5 * exact.norm()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {(e, s): train(e, s) for e in ("ddp", "fsdp2") for s in SCHEMES}
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[1])
    # A process that leaves before the other has ended, and with its group open, can be aborted at its exit.
    dist.barrier()
    dist.destroy_process_group()
