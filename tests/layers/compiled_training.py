# SPDX-License-Identifier: Apache-2.0
"""Functions and models that are compiled in one graph, and training that is compared with eager mode."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from same_bits import assert_same
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import set_quantization_step


#: Random numbers in all three products.
STOCHASTIC = {
    "preset": "w4a4g4",
    "fprop": {"x": "rceil+stochastic"},
    "wgrad": {"grad": "rceil+stochastic", "x": "rceil+stochastic", "rotation": "random-32"},
}


def compiled(function, backend="aot_eager"):
    """One graph or an error, and how often it was compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


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
    expected = train(model, model, options)
    found = train(twin, call, options)
    assert counter.frame_count == 1
    if options.get("backend") != "inductor":
        return assert_same(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def adapted(folder, modules, preset="w4a16"):
    """A packed model with adapters on some modules."""
    options = {"quantization_config": MXFP4RLConfig(mode="packed", preset=preset), "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=modules, init_lora_weights=False)
    return get_peft_model(model, lora)
