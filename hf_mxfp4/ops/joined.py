# SPDX-License-Identifier: Apache-2.0
"""One product for packed layers that multiply the same input: q, k and v of an attention, gate and up of an MLP.

The first forward passes show which layers these are: one after the other gets the very same tensor. On GPUs their
packed tensors are then put into one buffer, rows after rows. The parameters stay the same objects and become views of
rows, so names, state dicts and files do not change. From then on the first layer computes the product of all rows, and
each of the others returns its slice of the result.

A layer computes alone with gradients, when it gets another input, when its input was written in between, and when its
weight was. If a slice is not used, or a tensor of a layer is replaced, the product is dissolved.

Both ways give the same bits, except on GPUs where sums have another order: in cuBLAS, which multiplies many rows, and
where another number of programs share a tile along K (`split_steps` in `mxfp4_kernels.decode.config`).
"""

import threading
import weakref
from typing import Any, Protocol

import torch

from .._logging import get_logger
from .packed import PackedPlan, PackedState, packed_forward
from .packed_operators import compiled_packed_linear, is_compiled
from .packed_weight import PackedWeight
from .quantization import is_captured


#: Backends whose products are joined. On CPUs a call costs little of a product, and joined ones are not faster.
BACKENDS = ("triton",)
#: The most layers of a product. All outputs are in memory at once, which a dense mixture of experts could not afford.
MOST_LAYERS = 4
#: Layers have a multiple of this many rows, so that all views are aligned as kernels need them.
ALIGNED_ROWS = 16


class JoinableLayer(Protocol):
    """A linear layer with packed weights."""

    name: str
    state: PackedState
    weight: torch.Tensor
    bias: torch.Tensor | None
    joined: "JoinedRows | None"

    def packed_weight(self) -> PackedWeight:
        """Return the packed tensors in the order of `PACKED_FIELDS`."""


class JoinedRows:
    """The place of a layer in a joined product.

    Attributes:
        product: the joined product.
        plan: computes the layer's product alone.
        start: the first row of the layer; the layer with row 0 computes the product.
        stop: the end of the rows of the layer.
        total: how many rows all layers have.
        addresses: the layer's part of the buffers.
        versions: how often the layer's tensors had been written when it last took a slice.
    """

    def __init__(self, product: "JoinedProduct", plan: PackedPlan, start: int, tensors: list[torch.Tensor]):
        self.product = product
        self.plan = plan
        self.start = start
        self.stop = start + plan.n
        self.total = product.plan.n
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.versions = [tensor._version for tensor in tensors]

    def __call__(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, state: PackedState
    ) -> torch.Tensor | None:
        """Return the layer's slice ``[..., N]`` of the product; `None` where the layer computes alone.

        Args:
            x: the input.
            packed: the packed tensors of the layer.
            bias: of the layer.
            state: of the layer.
        """
        self.plan.is_used = True
        product = self.product
        if product.weights is None or torch.is_grad_enabled():
            return None
        # Of tensors of inference mode nobody knows whether they were written.
        if x.is_inference():
            return None
        if self.start == 0:
            out = product.multiply(x) if self.plan.takes(x, packed, bias, state) else None
        else:
            # The input is the one that the plan of the first layer took.
            out = product.take(x, self.start)
            if state.spec is not self.plan.spec or self.plan.is_cast():
                return None
        if out is None:
            return None
        tensors = _tensors(packed, bias)
        if not self._has(tensors):
            product.dissolve("tensors were replaced")
            return None
        versions = [tensor._version for tensor in tensors]
        is_written = versions != self.versions
        self.versions = versions
        if is_written and self.start:
            return None
        return out[..., self.start : self.stop]

    def is_of(self, layer: JoinableLayer) -> bool:
        """Return whether the tensors of the layer are still the rows of the buffers."""
        return self._has(_tensors(layer.packed_weight(), layer.bias))

    def _has(self, tensors: list[torch.Tensor]) -> bool:
        return [tensor.data_ptr() for tensor in tensors] == self.addresses


class _Result:
    """The product of all rows, until all layers have taken their slices.

    Attributes:
        x: a weak reference to the input.
        version: how often the input had been written.
        stream: the stream of the GPU that multiplies; for others no order is known.
        out: the product.
        waiting: the first rows of layers that have not taken their slices.
    """

    __slots__ = ("out", "stream", "version", "waiting", "x")

    def __init__(self, x: torch.Tensor, out: torch.Tensor, waiting: set[int]):
        self.x = weakref.ref(x)
        self.version = x._version
        self.stream = _stream_of(x)
        self.out = out
        self.waiting = waiting

    def is_of(self, x: torch.Tensor) -> bool:
        """Return whether ``x`` is the input, as it was, and the product is there for what follows."""
        return self.x() is x and self.version == x._version and self.stream == _stream_of(x)


class _OfThread(threading.local):
    """The result that layers of this thread have not all taken."""

    result: _Result | None = None


class JoinedProduct:
    """The product of the rows of several layers.

    Args:
        layers: in the order in which they are called.
        x: an input.

    Attributes:
        layers: weak references to the layers.
        plan: computes the product.
        weights: the packed tensors and the bias of all rows; `None` after the product is dissolved.
        traced: input and product of the graph that Dynamo traces.
    """

    def __init__(self, layers: list[JoinableLayer], x: torch.Tensor):
        self.layers = [weakref.ref(layer) for layer in layers]
        *packed, bias = _in_one_buffer(layers)
        plans = [layer.state.plans[x.dtype] for layer in layers]
        self.plan = PackedPlan(plans[0].spec, x, tuple(packed), x.dtype)
        self.weights: tuple[PackedWeight, torch.Tensor | None] | None = (tuple(packed), bias)
        self.traced: tuple[torch.Tensor, torch.Tensor] | None = None
        self._of_thread = _OfThread()
        start = 0
        starts = []
        for layer, plan in zip(layers, plans, strict=True):
            layer.joined = JoinedRows(self, plan, start, _tensors(layer.packed_weight(), layer.bias))
            starts.append(start)
            start += plan.n
        self._others = starts[1:]

    def multiply(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product of all rows, and keep it for the other layers; `None` once it is dissolved."""
        of_thread = self._of_thread
        if of_thread.result is not None:
            self.dissolve("they were not called with the same input")
        weights = self.weights
        if weights is None:
            return None
        out = self._multiply(x, weights)
        of_thread.result = _Result(x, out, set(self._others))
        return out

    def take(self, x: torch.Tensor, start: int) -> torch.Tensor | None:
        """Return the product of all rows for the layer that begins at ``start``; `None` if there is none of ``x``."""
        of_thread = self._of_thread
        result = of_thread.result
        if result is None or start not in result.waiting or not result.is_of(x):
            return None
        result.waiting.remove(start)
        if not result.waiting:
            of_thread.result = None
        return result.out

    def multiply_now(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the product of all rows with the tensors that the layers have now: what the operator does.

        Raises `RuntimeError` when one of the layers is gone.
        """
        layers = [layer() for layer in self.layers]
        if None in layers:
            raise RuntimeError("a layer of a joined product of this compiled code is gone; compile again")
        weights = self.weights
        is_planned = dtype is self.plan.dtype and x.device == self.plan.device
        if weights is not None and is_planned and all(map(self._has_rows_of, layers)):
            return self._multiply(x, weights)
        parts = [packed_forward(x, layer.packed_weight(), layer.bias, layer.state, None, dtype) for layer in layers]
        return torch.cat(parts, dim=-1)

    def _has_rows_of(self, layer: Any) -> bool:
        return layer.joined is not None and layer.joined.product is self and layer.joined.is_of(layer)

    def _multiply(self, x: torch.Tensor, weights: tuple[PackedWeight, torch.Tensor | None]) -> torch.Tensor:
        if _unreported:
            _report()
        return self.plan(x, *weights)

    def dissolve(self, reason: str) -> None:
        """Let the layers compute alone from now on."""
        if self.weights is None:
            return
        self.weights = None
        self._of_thread = _OfThread()
        names = [layer.name for layer in (ref() for ref in self.layers) if layer is not None]
        get_logger().info("%s are no longer multiplied in one product: %s", ", ".join(names), reason)


def traced_product(joined: JoinedRows, x: torch.Tensor, layer: JoinableLayer) -> torch.Tensor:
    """Return the product of a layer where Dynamo traces: the first layer calls the operator for all rows.

    The result goes from layer to layer in an attribute, which is empty again at the end of a graph.
    """
    product = joined.product
    if joined.start == 0:
        out = compiled_packed_linear(x, layer.weight, layer.bias, joined.total)
        product.traced = (x, out)
    elif product.traced is None or product.traced[0] is not x:
        return compiled_packed_linear(x, layer.weight, layer.bias)
    else:
        out = product.traced[1]
    if joined.stop == joined.total:
        product.traced = None
    return out[..., joined.start : joined.stop]


# ---- which layers are joined ----------------------------------------------------------------------------------------


class _LastInput(threading.local):
    """The input that layers of this thread multiplied last for the first time, and these layers."""

    x: Any = None
    version = 0
    layers: tuple = ()


_last = _LastInput()
#: Products of which the log knows nothing yet.
_unreported: list[Any] = []


def observe(layer: JoinableLayer, x: torch.Tensor) -> None:
    """Note that a layer has multiplied ``x`` by a new plan, and join it with those that multiplied the same before."""
    if layer.state.plans[x.dtype].reader not in BACKENDS or x.is_inference():
        return
    if _last.x is None or _last.x() is not x or _last.version != x._version:
        _last.x = weakref.ref(x)
        _last.version = x._version
        _last.layers = ()
    layers = [before for before in (ref() for ref in _last.layers) if before is not None]
    if len(layers) == MOST_LAYERS:
        layers = []
    layers.append(layer)
    _last.layers = tuple(map(weakref.ref, layers))
    if len(layers) == 1:
        return
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        if not _can_be_joined(layers, x):
            _last.layers = (weakref.ref(layer),)
            return
        try:
            _unreported.append(weakref.ref(JoinedProduct(layers, x)))
        except torch.OutOfMemoryError:
            get_logger().warning("no memory to join %s; they are multiplied one by one", layer.name)


def _can_be_joined(layers: list[Any], x: torch.Tensor) -> bool:
    """Return whether layers have equal plans that multiply codes, and tensors that can be moved."""
    if is_captured(x):
        return False
    first = layers[0].state.plans.get(x.dtype)
    for layer in layers:
        packed = layer.packed_weight()
        plan = layer.state.plans.get(x.dtype)
        if plan is None or not plan.takes(x, packed, layer.bias, layer.state) or plan.spec != first.spec:
            return False
        if plan.multiply_codes is None or plan.on_fp4_cores is not None or plan.n % ALIGNED_ROWS:
            return False
        if any(tensor.is_inference() for tensor in _tensors(packed, layer.bias)):
            return False
        # CUDA graphs and compiled code may refer to the memory of the layer.
        if plan.is_used or layer.state.is_captured or is_compiled(packed[0]):
            return False
    has_bias = {layer.bias is not None for layer in layers}
    addresses = {layer.weight.data_ptr() for layer in layers}
    names = {layer.name for layer in layers}  # those of a copy of the model are the same
    return len(has_bias) == 1 and len(addresses) == len(names) == len(layers)


def _in_one_buffer(layers: list[JoinableLayer]) -> list[torch.Tensor | None]:
    """Put each packed tensor, and the bias, of all layers into one buffer, of which the parameters become views.

    Returns the buffers in the order of `PACKED_FIELDS`, and that of the bias; `None` for tensors that layers have not.
    """
    of_layers = [(*layer.packed_weight(), layer.bias) for layer in layers]
    # All of them before the first parameter changes: there may be no memory.
    buffers = [None if parts[0] is None else torch.cat(parts) for parts in zip(*of_layers, strict=True)]
    start = 0
    for tensors in of_layers:
        stop = start + len(tensors[0])
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if tensor is not None:
                tensor.data = buffer[start:stop]
        start = stop
    return buffers


def _stream_of(x: torch.Tensor) -> int | None:
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else None


def _tensors(packed: PackedWeight, bias: torch.Tensor | None) -> list[torch.Tensor]:
    return [tensor for tensor in (*packed, bias) if tensor is not None]


def _report() -> None:
    """Log how many layers are in products that the log has not reported."""
    products = [product for product in (ref() for ref in _unreported) if product is not None]
    _unreported.clear()
    n_layers = sum(len(product.layers) for product in products)
    get_logger().info("%d packed layers with common inputs are multiplied in %d products", n_layers, len(products))
