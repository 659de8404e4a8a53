# SPDX-License-Identifier: Apache-2.0
"""Options of the vLLM that TRL makes, which TRL has none of its own for."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from trl.generation import vllm_generation


@contextlib.contextmanager
def given_to_vllm(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Within this context TRL makes vLLM with the options that ``change`` makes of its own.

    Raises `RuntimeError` at the end when it has made none.
    """
    make = getattr(vllm_generation, "LLM", None)
    if make is None:  # without vLLM TRL says so
        yield
        return
    made = []

    def make_changed(*arguments: Any, **options: Any) -> Any:
        made.append(True)
        return make(*arguments, **change(options))

    vllm_generation.LLM = make_changed
    try:
        yield
    finally:
        vllm_generation.LLM = make
    if not made:
        raise RuntimeError("TRL starts vLLM in another way than this version of hf-mxfp4 knows")
