# SPDX-License-Identifier: Apache-2.0
"""How a module of transformers keeps the weights of many experts: in one 3-D parameter for each projection.

What `transformers.integrations.moe.use_experts_implementation` says of its classes is taken from their attributes; the
order of gate and up columns is left to the class's own `_apply_gate`.
"""

from torch import nn


#: What the decorator leaves on every instance that it made (transformers 5.17 and newer).
_MARKS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")


def projections(experts: nn.Module) -> tuple[str, str]:
    """Names of the two weights, in the order in which tokens pass them; each may have a ``<name>_bias``."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def matrix_names(name: str, experts: nn.Module) -> list[str]:
    """A name for each linear map in experts called ``name``, as they are counted and reported: ``<name>.3.down_proj``
    is one of expert 3."""
    names = projections(experts)
    count = getattr(experts, names[0]).shape[0]
    return [f"{name}.{expert}.{projection}" for expert in range(count) for projection in names]


def weight_size(experts: nn.Module, projection: str) -> tuple[int, int, int]:
    """``(experts, N, K)`` of a full-precision weight, which maps ``K`` features to ``N``."""
    count, rows, columns = getattr(experts, projection).shape
    return (count, columns, rows) if experts.is_transposed else (count, rows, columns)


def unsupported_reason(experts: nn.Module) -> str | None:
    """Why a module with 3-D weights is not experts of the one layout known here; `None` when it is."""
    missing = [mark for mark in _MARKS if not hasattr(experts, mark)]
    if missing:
        return f"{type(experts).__name__} is not made by transformers' use_experts_implementation"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over processes (expert parallelism)"
    names = projections(experts)
    allowed = {*names, *(f"{name}_bias" for name in names)}
    own = {name: tensor for name, tensor in experts.named_parameters(recurse=False)}
    needed = allowed if experts.has_bias else set(names)
    if own.keys() != needed:
        return f"{type(experts).__name__} has the parameters {sorted(own)} instead of {sorted(needed)}"
    if any(own[name].dim() != 3 for name in names):
        return f"the weights of {type(experts).__name__} are not 3-D"
    (up_experts, _, hidden), (down_experts, out, _) = (weight_size(experts, name) for name in names)
    if (up_experts, hidden) != (down_experts, out):
        return f"the weights of {type(experts).__name__} do not fit each other"
    return None
