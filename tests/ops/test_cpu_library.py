# SPDX-License-Identifier: Apache-2.0
"""Compiling, caching and checking the library of the fused CPU functions, each in a process of its own."""

import os
import shutil
import subprocess
from pathlib import Path

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


def backend_in_a_new_process(*without: str, **variables: str) -> tuple[str, str]:
    """What a process prints and logs."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    result = run(code(PRINT_BACKEND), environment={**environment, **variables})
    assert result.returncode == 0, result.stderr
    return result.stdout, "".join(line for line in result.stderr.splitlines() if line.startswith("[hf_mxfp4]"))


def script(path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The library of this process, or a compiled one where that is not kept."""
    path = Path(library.load()[0]._name)
    return path if path.exists() else library._compiled(tmp_path_factory.mktemp("built"), library._key())


@pytest.fixture
def compiler(tmp_path, built) -> str:
    """A compiler that takes no time: it gives what is there already."""
    return script(tmp_path / "c++", f'#!/bin/sh\nfor target; do :; done\ncp {built} "$target"\n')


@pytest.fixture
def prefilled(tmp_path, built) -> Path:
    """A cache with the library."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    shutil.copy(built, folder)
    (folder / built.name).chmod(0o700)
    return folder


def test_without_a_compiler_everything_runs_eagerly_with_one_warning(tmp_path):
    out, log = backend_in_a_new_process(CXX="", PATH=str(tmp_path), HF_MXFP4_CACHE=str(tmp_path / "cache"))
    assert out.startswith("eager no C++ compiler was found")
    assert log.count("runs eagerly") == 1 and "install g++ or clang++" in log


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path):
    broken = script(tmp_path / "c++", "#!/bin/sh\necho no luck >&2\nexit 1\n")
    out, _ = backend_in_a_new_process(CXX=broken, HF_MXFP4_CACHE=str(tmp_path / "cache"))
    assert out.startswith("eager") and broken in out and "no luck" in out
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_that_computes_otherwise_is_not_used(tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for source in library.SOURCES:
        (wrong / source.name).write_text(source.read_text().replace("6291456.0f", "12582912.0f"))
    arguments = f'$(echo "$@" | sed "s,{library.SOURCES[0].parent},{wrong},g") -O0'  # most of the time is optimization
    quick = script(tmp_path / "c++", f"#!/bin/sh\nexec {library._compiler()} {arguments}\n")
    out, log = backend_in_a_new_process(CXX=quick, HF_MXFP4_CACHE=str(tmp_path / "cache"))
    assert out.startswith("eager") and "disagree with the reference" in out
    assert f"delete {next((tmp_path / 'cache').iterdir())}" in log


def test_the_library_is_compiled_once_and_kept(tmp_path, compiler):
    cache = {"HF_MXFP4_CACHE": str(tmp_path / "cache"), "CXX": compiler}
    assert backend_in_a_new_process(**cache)[0].startswith("cpu None")
    (compiled,) = (tmp_path / "cache").iterdir()
    assert compiled.stat().st_mode & 0o777 == 0o700 and compiled.parent.stat().st_mode & 0o777 == 0o700
    stamp = compiled.stat().st_mtime_ns
    assert backend_in_a_new_process(**cache)[0].startswith("cpu None")
    assert [compiled] == list((tmp_path / "cache").iterdir()) and compiled.stat().st_mtime_ns == stamp


def test_a_library_that_is_there_needs_no_compiler_and_no_write_permission(prefilled):
    for path in (*prefilled.iterdir(), prefilled):
        path.chmod(0o500)
    out, log = backend_in_a_new_process(CXX="", PATH="", HF_MXFP4_CACHE=str(prefilled))
    assert out.startswith("cpu None") and not log


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:500]),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(b""),
        lambda path: path.chmod(0o770),
        lambda path: os.chown(path, 12345, -1),
        lambda path: path.parent.chmod(0o770),
        lambda path: path.parent.chmod(0o777),
    ],
    ids=["head", "half", "zeros", "empty", "group writes", "other owner", "group's folder", "everybody's folder"],
)
def test_what_is_damaged_or_not_private_is_not_loaded(damage, prefilled):
    """There is no compiler that could replace it, so the process runs eagerly instead of ending."""
    (path,) = prefilled.iterdir()
    try:
        damage(path)
    except PermissionError:
        pytest.skip("only root can give a file away")
    out, log = backend_in_a_new_process(CXX="", PATH="", HF_MXFP4_CACHE=str(prefilled))
    assert out.startswith("eager no C++ compiler") and log.count("runs eagerly") == 1


def test_a_damaged_library_is_replaced(prefilled, compiler):
    (path,) = prefilled.iterdir()
    path.write_bytes(bytes(1000))
    environment = {"CXX": compiler, "HF_MXFP4_CACHE": str(prefilled)}
    assert backend_in_a_new_process(**environment)[0].startswith("cpu None")
    assert any(path.stem.endswith(library._digest(path)) for path in prefilled.iterdir())


def test_a_library_without_the_functions_is_not_used(tmp_path):
    folder, empty = tmp_path / "cache", tmp_path / "empty.so"
    folder.mkdir(mode=0o700)
    subprocess.run([library._compiler(), "-shared", "-x", "c++", "/dev/null", "-o", str(empty)], check=True)
    target = folder / f"{library._key()}-{library._digest(empty)}.so"
    shutil.copy(empty, target)
    target.chmod(0o700)
    out, log = backend_in_a_new_process(HF_MXFP4_CACHE=str(folder))
    assert out.startswith("eager") and "mxfp4_quantize" in out and log.count("runs eagerly") == 1


@pytest.mark.parametrize("place", ["a file", "others can write", "no home"])
def test_without_a_usable_folder_a_temporary_one_serves_with_a_warning(place, tmp_path, compiler):
    variables, without = (
        {"CXX": compiler, "TMPDIR": str(tmp_path)},
        ("XDG_CACHE_HOME", "HF_MXFP4_CACHE"),
    )
    target = tmp_path / "cache"
    if place == "no home":
        without = (*without, "HOME")
        job = f"import os, pwd\npwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError(uid))\n{PRINT_BACKEND}"
    else:
        variables["HF_MXFP4_CACHE"], job = str(target), PRINT_BACKEND
        target.touch() if place == "a file" else target.mkdir()
        target.chmod(0o777)
    environment = {name: value for name, value in os.environ.items() if name not in without} | variables
    result = run(code(job), environment=environment)
    assert result.returncode == 0 and result.stdout.startswith("cpu None"), result.stderr
    assert result.stderr.count("the compiled CPU functions are not kept") == 1
    assert not list(tmp_path.glob("hf_mxfp4-*")), "a temporary folder is left"


def test_the_default_folder_is_made_private(tmp_path, compiler):
    folder = tmp_path / "hf_mxfp4"
    folder.mkdir()
    folder.chmod(0o775)  # as other parts of the package make it
    variables = {"XDG_CACHE_HOME": str(tmp_path), "CXX": compiler}
    out, log = backend_in_a_new_process("HF_MXFP4_CACHE", **variables)
    assert out.startswith("cpu None") and "not kept" not in log
    assert folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.iterdir())) == 1
