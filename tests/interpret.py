# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter take about three quarters of the time that it takes by itself.

Triton's interpreter replaces the operators in ``triton.language`` for each kernel that is launched, and again, to no
effect, for each function that the kernel calls. Here it replaces them once for each launch, where Triton is as in 3.7.
"""

from triton.runtime import interpreter


def patch_once_for_each_launch() -> None:
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    language, patch, patched = interpreter.tl, interpreter._patch_lang, set()

    class Launch(interpreter._LangPatchScope):
        def restore(self):
            super().restore()
            patched.clear()

    def patch_lang(function):
        modules = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
        if modules <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not patched:
            scope.__class__ = Launch
        patched.update(modules)
        return scope

    interpreter._patch_lang = patch_lang
