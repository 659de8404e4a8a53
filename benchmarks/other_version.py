# SPDX-License-Identifier: Apache-2.0
"""Run a benchmark of this checkout with the package of another one, to compare two versions.

    python -m benchmarks.other_version FOLDER BENCHMARK [OPTION ...]

FOLDER is a checkout, such as `git worktree add FOLDER COMMIT` makes. Records name its commit. The benchmark may only
use what both versions have.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .records import ROOT


def main() -> None:
    """Run the benchmark, and exit as it does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="checkout of the other version")
    parser.add_argument("benchmark", help="module of this version's benchmarks")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the benchmark")
    options = parser.parse_args()
    package = options.folder.resolve()
    with tempfile.TemporaryDirectory() as here:
        for name in ("benchmarks", "tests"):
            (Path(here) / name).symlink_to(ROOT / name)
        paths = [here, package, package / "kernels"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [sys.executable, "-m", f"benchmarks.{options.benchmark}", *options.options]
        sys.exit(subprocess.run(command, cwd=here, env=environment).returncode)


if __name__ == "__main__":
    main()
