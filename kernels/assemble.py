# SPDX-License-Identifier: Apache-2.0
"""Lay mxfp4_kernels out as a repository of Hugging Face's Kernel Hub, without kernel-builder: nothing is compiled.

    python kernels/assemble.py OUT

writes ``OUT/build/torch-<backend>/`` for each backend of `build.toml`: the package, and a `metadata.json` with the
digests of its files. `kernels.get_local_kernel(OUT)` loads it where PyTorch has one of these backends.
"""

import base64
import hashlib
import json
import re
import sys
from pathlib import Path


SOURCE = Path(__file__).parent
#: Older versions of the `kernels` library look for a folder of the kernel's name; it stands for the one above.
_COMPATIBLE = '''# SPDX-License-Identifier: Apache-2.0
"""The kernel in the folder above, for versions of the `kernels` library that look for it here."""

import importlib.util
import sys
from pathlib import Path


_path = Path(__file__).parent.parent / "__init__.py"
_spec = importlib.util.spec_from_file_location(f"{__name__}_above", _path)
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
__all__ = list(_module.__all__)
globals().update({name: getattr(_module, name) for name in __all__})
'''


def assemble(out: Path) -> list[Path]:
    """Write all build variants below ``out``; their folders. Raises `FileExistsError` when ``out`` has a build."""
    general = _general()
    package = SOURCE / general["name"].replace("-", "_")
    sources = {path.relative_to(package).as_posix(): path.read_bytes() for path in _sources(package)}
    sources[f"{package.name}/__init__.py"] = _COMPATIBLE.encode()
    digests = {name: hashlib.sha256(content) for name, content in sources.items()}
    whole = hashlib.sha256(b"".join(digest.digest() for digest in digests.values())).hexdigest()[:7]
    variants = []
    for backend in general["backends"]:
        variant = out / "build" / f"torch-{backend}"
        (variant / package.name).mkdir(parents=True)
        for name, content in sources.items():
            (variant / name).parent.mkdir(parents=True, exist_ok=True)
            (variant / name).write_bytes(content)
        metadata = {
            "id": f"_{package.name}_{backend}_{whole}",
            "name": general["name"],
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {
                "algorithm": "sha256",
                "files": {name: base64.b64encode(digest.digest()).decode() for name, digest in digests.items()},
            },
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        variants.append(variant)
    return variants


def _sources(package: Path) -> list[Path]:
    """Files of the package: Python, and the C++ that CPUs compile when they first use it."""
    return sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h"))


def _general() -> dict:
    """Return that section of `build.toml`. Python reads TOML from 3.11 on; this is JSON but for comments."""
    section = (SOURCE / "build.toml").read_text().partition("[general]\n")[2].partition("\n[")[0]
    lines = (re.fullmatch(r"(\w+) = (.*?)( #.*)?", line) for line in section.splitlines() if line)
    return {match[1]: json.loads(match[2]) for match in lines}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for folder in assemble(Path(sys.argv[1])):
        print(folder)
