# SPDX-License-Identifier: Apache-2.0
"""`torch.library` operators of namespace `hf_mxfp4`: what compiled code calls in the place of the eager functions.

Where Dynamo traces, a layer calls the operator of its whole product, and the operator, when it runs, calls the eager
function: the same code, backends and kernels, hence the same bits. What the compiler may change is around operators,
never in them. Three things make that one graph that is never compiled again:

* An operator is a function of tensors and of what shapes depend on (dtypes, schemes as text, what is kept of an input).
  It keeps nothing for its backward pass but its outputs, and returns no tensor that it was given.
* State that moves from step to step (random numbers, cached weights) is found through the layer's number
  when the operator runs ([`hf_mxfp4.gemm.state`]). Such operators are tagged `cudagraph_unsafe`, so that a CUDA graph
  never replays the numbers of one step; those without state or counts that the host reads are not.
  A packed copy of a trainable weight, kept for a rollout, is an input like a packed layer's ([`WeightCache.share`]).
* The backward pass is an operator of its own, without a gradient: there is no second derivative.

To make another product an operator: give it a forward and a backward function of plain arguments, without `ctx` (as
[`hf_mxfp4.gemm.linear`] has them); wrap each in `custom_op`, outputs contiguous; write what shapes they have
(`register_fake`); connect them (`register_autograd`), keep only inputs and outputs, and mark kept outputs as not
differentiable; have the layer call it under `torch.compiler.is_compiling()`; test it with `opcheck`, and compiled
against eager to the bit.
"""

from . import tensors  # noqa: F401  (registers operators)
from .linear import compiled_linear
from .packed import compiled_packed_linear


__all__ = ["compiled_linear", "compiled_packed_linear"]
