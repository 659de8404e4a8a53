# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter take about a third of the time that it takes by itself.

Next to nothing of that time is arithmetic. Triton's interpreter replaces the operators in ``triton.language`` for each
kernel that is launched, and again, to no effect, for each function that the kernel calls: here once for each launch. It
makes the types of blocks, and looks up those of NumPy, for each operation anew: here once for each type. And it
computes everything of integers twice, for an overflow check that asserts nothing unless debugging: not here. Values are
those of the interpreter, each computed by its own functions. Where Triton is not as in 3.7, it stays as it is.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_faster() -> None:
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch_once_for_each_launch()
    keep_types()
    keep_type_rules(type(interpreter.interpreter_semantic))
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def patch_once_for_each_launch() -> None:
    language = interpreter.tl
    patch = interpreter._patch_lang
    patched = set()
    languages: dict[Callable, set[int]] = {}
    members: dict[int, list[tuple[str, Any]]] = {}

    class Launch(interpreter._LangPatchScope):
        def restore(self):
            super().restore()
            patched.clear()

    def patch_builtin(package, builder, scope):
        if id(package) not in members:
            members[id(package)] = [pair for pair in inspect.getmembers(package) if tl.core.is_builtin(pair[1])]
        for name, member in members[id(package)]:
            interpreter._patch_attr(package, name, member, builder, scope)

    def patch_lang(function):
        if function not in languages:
            values = function.__globals__.values()
            languages[function] = {id(value) for value in values if value is language or value is language.core}
        modules = languages[function]
        if modules <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:
            scope.__class__ = Launch
        patched.update(modules)
        return scope

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang


def keep_types() -> None:
    """Types of blocks, of their shapes as tensors have them, and of NumPy are made once."""
    block = tl.core.block_type
    tensor = tl.core.tensor
    make_block = block.__init__
    make_tensor = tensor.__init__
    numpy_type = interpreter._get_np_dtype
    blocks: dict[tuple, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block_init(self, element_ty, shape):
        if type(element_ty) is not tl.dtype:  # pointers' names leave something out
            return make_block(self, element_ty, shape)
        key = (element_ty.name, *[size.value if type(size) is tl.constexpr else size for size in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            of_tensors = tl.core.tensor.__new__(tl.core.tensor)
            make_tensor(of_tensors, None, self)
            self.of_tensors = of_tensors.shape, of_tensors.numel
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor_init(self, handle, type):
        if "of_tensors" in type.__dict__:
            self.handle = handle
            self.type = type
            self.dtype = type.element_ty
            self.shape, self.numel = type.of_tensors
        else:
            make_tensor(self, handle, type)

    def get_np_dtype(dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = numpy_type(dtype)
        return numpy_types[dtype.name]

    block.__init__ = block_init
    tensor.__init__ = tensor_init
    interpreter._get_np_dtype = get_np_dtype


def keep_type_rules(semantic: type) -> None:
    """The common type of two is found once, and of equal types nothing is broadcast."""
    common = semantic.computation_type_impl
    broadcast = semantic.broadcast_impl_value
    equal = tl.dtype.__eq__
    found: dict[tuple, tl.dtype] = {}

    def computation_type_impl(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in found:
            found[key] = common(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return found[key]

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.shape.values == rhs.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.computation_type_impl = computation_type_impl
    semantic.broadcast_impl_value = broadcast_impl_value
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
