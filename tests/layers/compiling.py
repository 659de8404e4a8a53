# SPDX-License-Identifier: Apache-2.0
"""Compiled twins of layers and models, to be compared with eager ones."""

import copy

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_mxfp4.layers import set_quantization_step


#: Random numbers in all three products.
STOCHASTIC = {
    "preset": "w4a4g4",
    "fprop": {"x": "rceil+stochastic"},
    "wgrad": {"grad": "rceil+stochastic", "x": "rceil+stochastic", "rotation": "random-32"},
}
#: Blocks above a threshold that moves from step to step.
SELECTIVE = {"preset": "w4a4", "outlier_fallback": 0.5, "outlier_fallback_rate": 0.1}


def compiled(function, backend="aot_eager"):
    """One graph or an error, and how often it was compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def train(model, function, options, steps=3) -> list[torch.Tensor]:
    """Losses, logits and gradients of a few steps of SGD."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(steps):
        if options.get("random"):
            set_quantization_step(model, step)
        ids = torch.randint(2, 32, (2, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
            out = function(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        found += [out.loss.detach(), out.logits.detach()]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found


def check_training(model, **options):
    """A model compiled once trains as in eager mode: to the bit, or as inductor rounds."""
    model.train()
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.disable_input_require_grads()  # PEFT's hook for the reentrant kind
    twin = copy.deepcopy(model)
    call, counter = compiled(twin, options.get("backend", "aot_eager"))
    expected, found = train(model, model, options), train(twin, call, options)
    assert counter.frame_count == 1
    if options.get("backend") != "inductor":
        return assert_equal(found, expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
