# SPDX-License-Identifier: Apache-2.0
"""Compiling, caching and checking the library of the fused CPU functions, each in a process of its own."""

import os

import pytest
from processes import code, run

from hf_mxfp4.backends.cpu import library


pytestmark = pytest.mark.skipif(library.load()[0] is None, reason=f"no fused CPU functions: {library.load()[1]}")

PRINT_BACKEND = """
import torch
from hf_mxfp4.numerics import QuantScheme, apply_scheme
from hf_mxfp4.backends import backend_for, fake_quantize
x = torch.randn(8, 128)
assert torch.equal(fake_quantize(x, QuantScheme()), apply_scheme(x, QuantScheme()))
print(*backend_for("cpu", x.dtype, QuantScheme(), "auto"))
"""


def backend_in_a_new_process(**variables: str) -> str:
    result = run(code(PRINT_BACKEND), environment={**os.environ, **variables})
    assert result.returncode == 0, result.stderr
    return result.stdout


def script(path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def quick_compiler(folder, arguments: str = '"$@"') -> str:
    """The compiler, asked not to optimize, which the bits do not depend on and most of its time goes to."""
    return script(folder / "c++", f"#!/bin/sh\nexec {library._compiler()} {arguments} -O0\n")


def test_without_a_compiler_everything_runs_eagerly(tmp_path):
    out = backend_in_a_new_process(CXX="", PATH=str(tmp_path), HF_MXFP4_CACHE=str(tmp_path / "cache"))
    assert out.startswith("eager no C++ compiler was found")


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path):
    broken = script(tmp_path / "c++", "#!/bin/sh\necho no luck >&2\nexit 1\n")
    out = backend_in_a_new_process(CXX=broken, HF_MXFP4_CACHE=str(tmp_path / "cache"))
    assert out.startswith("eager") and broken in out and "no luck" in out
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_that_computes_otherwise_is_not_used(tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for source in library.SOURCES:
        (wrong / source.name).write_text(source.read_text().replace("6291456.0f", "12582912.0f"))
    quick = quick_compiler(tmp_path, f'$(echo "$@" | sed "s,{library.SOURCES[0].parent},{wrong},g")')
    out = backend_in_a_new_process(CXX=quick, HF_MXFP4_CACHE=str(tmp_path / "cache"))
    assert out.startswith("eager") and "disagree with the reference" in out


def test_the_library_is_compiled_once_and_kept(tmp_path):
    cache = {"HF_MXFP4_CACHE": str(tmp_path / "cache"), "CXX": quick_compiler(tmp_path)}
    assert backend_in_a_new_process(**cache).startswith("cpu None")
    (compiled,) = (tmp_path / "cache").iterdir()
    stamp = compiled.stat().st_mtime_ns
    assert backend_in_a_new_process(**cache).startswith("cpu None")
    assert [compiled] == list((tmp_path / "cache").iterdir()) and compiled.stat().st_mtime_ns == stamp
    compiled.write_bytes(compiled.read_bytes()[:500])  # damaged: made anew
    assert backend_in_a_new_process(**cache).startswith("cpu None")
    assert [compiled] == list((tmp_path / "cache").iterdir()) and compiled.stat().st_size > 500


def test_a_cache_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    assert "can be written by others" in backend_in_a_new_process(HF_MXFP4_CACHE=str(folder))
