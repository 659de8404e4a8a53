# SPDX-License-Identifier: Apache-2.0
"""Compiling, caching and checking the library of the fused CPU functions, each in a process of its own."""

import os
import shutil
from pathlib import Path

import pytest
from processes import code, run

from mxfp4_kernels import cpu as library


pytestmark = pytest.mark.skipif(library.load()[0] is None, reason=f"no fused CPU functions: {library.load()[1]}")

PRINT_BACKEND = """
import torch
from hf_mxfp4.numerics import QuantScheme, apply_scheme
from hf_mxfp4.backends import backend_for, fake_quantize
x = torch.randn(8, 128)
assert torch.equal(fake_quantize(x, QuantScheme()), apply_scheme(x, QuantScheme()))
print(*backend_for("cpu", x.dtype, QuantScheme(), "auto"))
"""


def backend_in_a_new_process(**variables) -> tuple[str, str]:
    """What a process prints and logs."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    result = run(code(PRINT_BACKEND), environment=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout, "".join(line for line in result.stderr.splitlines() if line.startswith("[hf_mxfp4]"))


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def compiler(tmp_path) -> Path:
    """A compiler that takes no time: it gives the library of this process."""
    return script(tmp_path / "c++", f'#!/bin/sh\nfor target; do :; done\ncp {library.load()[0]._name} "$target"\n')


def test_without_a_compiler_everything_runs_eagerly_with_one_warning(tmp_path):
    out, log = backend_in_a_new_process(CXX="", PATH=tmp_path, HF_MXFP4_CACHE=tmp_path / "cache")
    assert out.startswith("eager no C++ compiler was found")
    assert log.count("runs eagerly") == 1 and "install g++ or clang++" in log


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path):
    broken = script(tmp_path / "c++", "#!/bin/sh\necho no luck >&2\nexit 1\n")
    out, _ = backend_in_a_new_process(CXX=broken, HF_MXFP4_CACHE=tmp_path / "cache")
    assert out.startswith("eager") and str(broken) in out and "no luck" in out
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_that_computes_otherwise_is_not_used(tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for source in library.SOURCES:
        (wrong / source.name).write_text(source.read_text().replace("6291456.0f", "12582912.0f"))
    arguments = f'$(echo "$@" | sed "s,{library.SOURCES[0].parent},{wrong},g") -O0'  # most of the time is optimization
    quick = script(tmp_path / "c++", f"#!/bin/sh\nexec {shutil.which('c++')} {arguments}\n")
    out, log = backend_in_a_new_process(CXX=quick, HF_MXFP4_CACHE=tmp_path / "cache")
    assert out.startswith("eager") and "disagree with the reference" in out
    assert f"delete {next((tmp_path / 'cache').iterdir())}" in log


def test_the_library_is_compiled_once_kept_and_replaced_where_it_is_damaged(tmp_path, compiler):
    cache = tmp_path / "cache"
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX=compiler)[0].startswith("cpu None")
    (compiled,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    out, log = backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX="", PATH="")
    assert out.startswith("cpu None") and not log
    compiled.write_bytes(compiled.read_bytes()[:500])
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX="", PATH="")[0].startswith("eager no C++ compiler")
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX=compiler)[0].startswith("cpu None")
    assert list(cache.iterdir()) == [compiled] and compiled.stat().st_size > 500


def test_what_is_not_private_is_not_loaded(tmp_path, compiler):
    """What lies in the folder is run as code; the folder that nobody chose is made private."""
    cache = tmp_path / "hf_mxfp4"
    cache.mkdir()
    cache.chmod(0o775)
    assert backend_in_a_new_process(XDG_CACHE_HOME=tmp_path, CXX=compiler)[0].startswith("cpu None")
    assert cache.stat().st_mode & 0o777 == 0o700
    (compiled,) = cache.iterdir()
    compiled.chmod(0o722)
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX="", PATH="")[0].startswith("eager no C++ compiler")
    compiled.chmod(0o700)
    cache.chmod(0o777)
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX="", PATH="")[0].startswith("eager no C++ compiler")


def test_without_a_usable_folder_a_temporary_one_serves_with_a_warning(tmp_path, compiler):
    (tmp_path / "cache").touch()
    out, log = backend_in_a_new_process(HF_MXFP4_CACHE=tmp_path / "cache", CXX=compiler, TMPDIR=tmp_path)
    assert out.startswith("cpu None") and log.count("the compiled CPU functions are not kept") == 1
    assert not list(tmp_path.glob("hf_mxfp4-*")), "a temporary folder is left"
