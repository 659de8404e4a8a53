# SPDX-License-Identifier: Apache-2.0
"""The Kernel Hub layout: metadata, digests, imports, and loading by the `kernels` library where it is installed."""

import ast
import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mxfp4_kernels


FOLDER = Path(mxfp4_kernels.__file__).parents[1]

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
expected = torch.load(sys.argv[1], weights_only=True)
assert torch.equal(result, expected)
assert torch.equal(kernel.dequantize(kernel.quantize(x, scheme), 256, scheme, torch.float32), expected)
assert 'mxfp4_kernels' not in sys.modules
print('ok')
""".replace("NAMES", repr(sorted(mxfp4_kernels.__all__)))


#: Layers of this project on a loaded kernel, in a process that has it under the name that they import.
LAYERS = """
sys.modules['mxfp4_kernels'] = kernel
import torch
from torch import nn
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
calls = []
def counted(name):
    function = getattr(kernel, name)
    setattr(kernel, name, lambda *given, **options: (calls.append(name), function(*given, **options))[1])
for name in ('fake_quantize', 'quantize', 'linear_w4a16'):
    counted(name)
torch.manual_seed(0)
linear, x = nn.Linear(160, 24).bfloat16(), torch.randn(3, 160).bfloat16()
plain = dict(preset='w4a4', macro_search='static', outlier_fallback=None)
for layer, options in ((MXFP4Linear, plain), (MXFP4PackedLinear, dict(preset='w4a16', mode='packed'))):
    found, expected = (
        layer.from_linear(linear, MXFP4RLConfig(**options, backend=name))(x) for name in ('triton', 'eager')
    )
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max(), layer
assert {'fake_quantize', 'quantize', 'linear_w4a16'} == set(calls), calls
names = [name for name in sys.modules if name.partition('.')[0] == 'mxfp4_kernels']
assert all(sys.modules[name].__file__.startswith(sys.argv[1]) for name in names), names
print('ok')
"""


def load_by_path(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def assembled(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("kernel") / "repository"
    out.mkdir()
    load_by_path("assemble_kernels", FOLDER / "assemble.py").assemble(out)
    return out


def variants(assembled: Path) -> list[Path]:
    return sorted((assembled / "build").iterdir())


def run_check(folder: Path, loading: str, *paths: str) -> None:
    import torch

    from hf_mxfp4.numerics import fake_quantize

    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    torch.save(fake_quantize(x, macro_block=128), folder / "expected.pt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", loading + CHECK, str(folder / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
    assert done.returncode == 0 and done.stdout.split() == ["ok"], done.stderr


def test_one_variant_for_each_backend(assembled):
    assert [path.name for path in variants(assembled)] == ["torch-cuda", "torch-rocm"]
    package = FOLDER / "mxfp4_kernels"
    sources = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    for variant in variants(assembled):
        written = {path.relative_to(variant).as_posix() for path in variant.rglob("*.py")}
        assert written == sources | {"mxfp4_kernels/__init__.py"} and "decode/product.py" in written


def test_metadata_says_what_the_hub_asks_for(assembled):
    for variant in variants(assembled):
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["name"] == "mxfp4-kernels" and metadata["version"] == 0
        assert metadata["license"] == "Apache-2.0" and metadata["python-depends"] == []
        assert metadata["backend"] == {"type": variant.name.removeprefix("torch-")}
        assert metadata["id"].isidentifier()
        assert re.fullmatch(r"_mxfp4_kernels_(cuda|rocm)_[0-9a-f]{7}", metadata["id"])


def test_digests_are_those_of_all_files(assembled):
    for variant in variants(assembled):
        digest = json.loads((variant / "metadata.json").read_text())["digest"]
        found = {
            path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in variant.rglob("*")
            if path.suffix in (".py", ".cpp", ".h")
        }
        assert digest == {"algorithm": "sha256", "files": found}


def test_the_id_changes_with_the_sources(assembled, tmp_path, monkeypatch):
    module = sys.modules["assemble_kernels"]
    copy = tmp_path / "kernels"
    shutil.copytree(FOLDER / "mxfp4_kernels", copy / "mxfp4_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "build.toml").write_bytes((FOLDER / "build.toml").read_bytes())
    for path in (copy / "mxfp4_kernels").rglob("*.py"):
        path.write_bytes(path.read_bytes() + b"\n")
    monkeypatch.setattr(module, "SOURCE", copy)
    (changed, _) = module.assemble(copy)
    ids = [json.loads((folder / "metadata.json").read_text())["id"] for folder in (changed, variants(assembled)[0])]
    assert ids[0] != ids[1]
    with pytest.raises(FileExistsError):
        module.assemble(copy)


def test_only_the_standard_library_torch_triton_and_itself_are_imported():
    for path in (FOLDER / "mxfp4_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [] if node.level else [node.module]
            else:
                continue
            for name in names:
                assert name.partition(".")[0] in {*sys.stdlib_module_names, "torch", "triton"}, f"{path.name}: {name}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_builders_file_agrees_with_what_is_assembled():
    import tomllib

    build = tomllib.loads((FOLDER / "build.toml").read_text())
    assert build["general"] == sys.modules["assemble_kernels"]._general()
    assert "torch-noarch" in build and "kernel" not in build
    assert (FOLDER / "torch-ext" / "mxfp4_kernels").resolve() == FOLDER / "mxfp4_kernels"
    assert "genKernelFlakeOutputs" in (FOLDER / "flake.nix").read_text()


def by_path(path: Path) -> str:
    """A program that loads a kernel without any library."""
    return (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('_unique_1', {str(path)!r})\n"
        "kernel = importlib.util.module_from_spec(spec)\n"
        "sys.modules['_unique_1'] = kernel\n"
        "spec.loader.exec_module(kernel)\n"
    )


@pytest.mark.parametrize("place", ["__init__.py", "mxfp4_kernels/__init__.py"])
def test_a_variant_works_from_any_path_under_any_name(assembled, place):
    run_check(assembled, by_path(variants(assembled)[0] / place))


def run_layers(assembled: Path, loading: str, *paths: str, **variables: str) -> None:
    """Run `LAYERS` on a kernel from the assembled repository."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(FOLDER.parent), *paths)), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", loading + LAYERS, str(assembled)]
    options = {"capture_output": True, "text": True, "cwd": assembled, "timeout": 300}
    done = subprocess.run(command, env=environment | variables, **options)
    assert done.returncode == 0 and done.stdout.split() == ["ok"], done.stderr


def test_layers_compute_on_a_variant(assembled):
    run_layers(assembled, by_path(variants(assembled)[0] / "__init__.py"))


def has_kernels_library() -> bool:
    spec = importlib.util.find_spec("kernels")
    return spec is not None and spec.origin is not None  # the folder kernels/ of this repository has none


@pytest.mark.skipif(not has_kernels_library(), reason="the kernels library is not installed")
def test_the_kernels_library_reads_and_loads_it(assembled):
    site = str(Path(importlib.util.find_spec("kernels").origin).parents[1])
    for variant in variants(assembled):
        loading = (
            "from pathlib import Path\n"
            "from kernels import get_local_kernel\n"
            "from kernels._rust import Build, Digest, DigestAlgorithm, Metadata\n"
            "import sys\n"
            f"assert len(Build.open({str(FOLDER)!r}).general.backends) == 2\n"
            f"variant = Path({str(variant)!r})\n"
            "metadata = Metadata.read_from_file(variant / 'metadata.json')\n"
            "metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))\n"
            "kernel = get_local_kernel(variant)\n"
        )
        run_check(assembled, loading, site)


@pytest.mark.skipif(not has_kernels_library(), reason="the kernels library is not installed")
def test_layers_compute_on_what_the_kernels_library_gets_from_a_repository(assembled):
    """A folder stands for the repository, as the library lets one say."""
    site = str(Path(importlib.util.find_spec("kernels").origin).parents[1])
    loading = "import sys\nfrom kernels import get_kernel\nkernel = get_kernel('some/mxfp4-kernels', version=0)\n"
    run_layers(assembled, loading, site, LOCAL_KERNELS=f"some/mxfp4-kernels={variants(assembled)[0]}")
