# SPDX-License-Identifier: Apache-2.0
"""The Kernel Hub layout: metadata, digests, imports, and loading by the `kernels` library where it is installed."""

import ast
import base64
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mxfp4_kernels
from hf_mxfp4.numerics import fake_quantize


FOLDER = Path(mxfp4_kernels.__file__).parents[1]
SOURCES = (".py", ".cpp", ".h")

#: What a loaded kernel must do, in a process that cannot import the package by its own name.
CHECK = """
import sys
assert sorted(kernel.__all__) == NAMES
import torch
assert kernel.unsupported_dtype(torch.float32) is None
assert 'row' in kernel.unsupported_scheme('rceil', 'row', 'static', 0.5)
scheme = kernel.Scheme(macro_block=128)
x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
result = kernel.fake_quantize(x, scheme)
expected = torch.load(sys.argv[1] + '/expected.pt', weights_only=True)
assert torch.equal(result, expected)
assert torch.equal(kernel.dequantize(kernel.quantize(x, scheme), 256, scheme, torch.float32), expected)
assert 'mxfp4_kernels' not in sys.modules
print('ok')
""".replace("NAMES", repr(sorted(mxfp4_kernels.__all__)))
#: Layers of this project on a loaded kernel, in a process that has it under the name that they import.
LAYERS = """
sys.modules.update(mxfp4_kernels=kernel, torchao=None)  # transformers would import torchao, for seconds
import torch
from torch import nn
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
calls = []
def counted(name):
    function = getattr(kernel, name)
    setattr(kernel, name, lambda *given, **options: (calls.append(name), function(*given, **options))[1])
for name in ('fake_quantize', 'quantize', 'PackedProduct'):
    counted(name)
torch.manual_seed(0)
linear, x = nn.Linear(160, 24).bfloat16(), torch.randn(3, 160).bfloat16()
plain = dict(preset='w4a4', macro_search='static', outlier_fallback=None)
for layer, options in ((MXFP4Linear, plain), (MXFP4PackedLinear, dict(preset='w4a16', mode='packed'))):
    found, expected = (
        layer.from_linear(linear, MXFP4RLConfig(**options, backend=name))(x) for name in ('triton', 'eager')
    )
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max(), layer
assert {'fake_quantize', 'quantize', 'PackedProduct'} == set(calls), calls
names = [name for name in sys.modules if name.partition('.')[0] == 'mxfp4_kernels']
assert all(sys.modules[name].__file__.startswith(sys.argv[1]) for name in names), names
print('ok')
"""


@pytest.fixture(scope="module")
def assembled(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("kernel") / "repository"
    out.mkdir()
    spec = importlib.util.spec_from_file_location("assemble_kernels", FOLDER / "assemble.py")
    module = sys.modules["assemble_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.assemble(out)
    return out


def variants(assembled: Path) -> list[Path]:
    return sorted((assembled / "build").iterdir())


def run_program(folder: Path, program: str, argument: Path, *paths: str, **variables: str) -> None:
    """Run a program, with these paths to import from, that interprets kernels and prints "ok"."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"} | variables
    command = [sys.executable, "-W", "ignore", "-c", program, str(argument)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
    assert done.returncode == 0 and set(done.stdout.split()) == {"ok"}, done.stderr


def run_check(folder: Path, loading: str, more: str, *paths: str) -> None:
    """Check a kernel, and go on with another program."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    torch.save(fake_quantize(x, macro_block=128), folder / "expected.pt")
    run_program(folder, loading + CHECK + more, folder, *paths)


def test_each_backend_has_a_variant_with_the_metadata_that_the_hub_asks_for(assembled):
    assert [path.name for path in variants(assembled)] == ["torch-cuda", "torch-rocm"]
    package = FOLDER / "mxfp4_kernels"
    sources = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.suffix in SOURCES}
    for variant in variants(assembled):
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["name"] == "mxfp4-kernels"
        assert metadata["version"] == 0
        assert metadata["license"] == "Apache-2.0"
        assert metadata["python-depends"] == []
        assert metadata["backend"] == {"type": variant.name.removeprefix("torch-")}
        assert re.fullmatch(r"_mxfp4_kernels_(cuda|rocm)_[0-9a-f]{7}", metadata["id"])
        digests = {
            path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in variant.rglob("*")
            if path.suffix in SOURCES
        }
        assert digests.keys() == sources | {"mxfp4_kernels/__init__.py"}
        assert "cpu/quantize.cpp" in sources
        assert metadata["digest"] == {"algorithm": "sha256", "files": digests}


def test_only_the_standard_library_torch_triton_and_itself_are_imported():
    for path in (FOLDER / "mxfp4_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                assert name.partition(".")[0] in {*sys.stdlib_module_names, "torch", "triton"}, f"{path.name}: {name}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_builders_file_agrees_with_what_is_assembled():
    import tomllib

    build = tomllib.loads((FOLDER / "build.toml").read_text())
    assert build["general"] == sys.modules["assemble_kernels"]._general()
    assert "torch-noarch" in build
    assert "kernel" not in build
    assert (FOLDER / "torch-ext" / "mxfp4_kernels").resolve() == FOLDER / "mxfp4_kernels"
    assert "genKernelFlakeOutputs" in (FOLDER / "flake.nix").read_text()


def by_path(path: Path, name: str) -> str:
    """A program that loads a kernel without any library."""
    return f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location({name!r}, {str(path)!r})
kernel = sys.modules[{name!r}] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
"""


def test_a_variant_works_from_any_path_under_any_name_and_layers_compute_on_it(assembled):
    paths = [variants(assembled)[0] / name for name in ("mxfp4_kernels/__init__.py", "__init__.py")]
    one, other = (by_path(path, f"_unique_{number}") for number, path in enumerate(paths))
    run_check(assembled, one, other + LAYERS, str(FOLDER.parent))


LIBRARY = importlib.util.find_spec("kernels")  # or the folder kernels/ of this repository, which has no origin
needs_library = pytest.mark.skipif(LIBRARY is None or LIBRARY.origin is None, reason="there is no kernels library")


@needs_library
def test_the_kernels_library_reads_and_loads_it(assembled):
    site = str(Path(LIBRARY.origin).parents[1])
    for variant in variants(assembled):
        loading = f"""
from pathlib import Path
from kernels import get_local_kernel
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
assert len(Build.open({str(FOLDER)!r}).general.backends) == 2
variant = Path({str(variant)!r})
metadata = Metadata.read_from_file(variant / 'metadata.json')
metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
kernel = get_local_kernel(variant)
"""
        run_check(assembled, loading, "", site)


@needs_library
def test_layers_compute_on_what_the_kernels_library_gets_from_a_repository(assembled):
    """A folder stands for the repository, as the library lets one say."""
    site = str(Path(LIBRARY.origin).parents[1])
    loading = "import sys\nfrom kernels import get_kernel\nkernel = get_kernel('some/mxfp4-kernels', version=0)\n"
    place = f"some/mxfp4-kernels={variants(assembled)[0]}"
    run_program(assembled, loading + LAYERS, assembled, str(FOLDER.parent), site, LOCAL_KERNELS=place)
