# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md names what exists, imports between packages point down, and the project stays small."""

import re
from pathlib import Path

import pytest

from benchmarks import packages


ROOT = Path(__file__).resolve().parents[1]
MAP = (ROOT / "docs" / "architecture.md").read_text()
#: Names in backquotes that begin with a folder of the project.
PATHS = sorted(set(re.findall(r"`((?:hf_mxfp4|kernels|recipes|benchmarks|tests|docs)/[\w./-]*)`", MAP)))


@pytest.mark.parametrize("path", PATHS)
def test_what_the_map_names_exists(path):
    assert (ROOT / path).exists()


def test_the_way_of_an_activation_names_what_each_file_defines():
    table = MAP.partition("what it decides |")[2].partition("\n\n")[0]
    rows = [part for line in table.splitlines()[2:] for part in line.split("|")[2].split(";")]
    named = [(re.findall(r"`([\w.]+)`", row)[0], name) for row in rows for name in re.findall(r"`([\w.]+)`", row)[1:]]
    missing = [
        (file, name)
        for file, name in named
        if not re.search(rf"^(class|def) {name}\b", (ROOT / "hf_mxfp4/ops" / file).read_text(), re.MULTILINE)
    ]
    assert len(named) >= 15
    assert missing == []


def test_every_file_of_ops_is_on_the_way_of_an_activation():
    way = MAP.partition("## An activation")[2].partition("\n## ")[0]
    files = {file.name for file in (ROOT / "hf_mxfp4/ops").glob("*.py")}
    assert {file for file in files if f"`{file}`" not in way} == {"__init__.py", "functional.py", "groups.py"}


def test_the_map_names_every_package():
    folders = {file.parent for top in ("hf_mxfp4", "kernels/mxfp4_kernels") for file in (ROOT / top).rglob("*.py")}
    folders |= {folder for folder in (ROOT / "recipes").iterdir() if any(folder.glob("*.py"))}
    missing = [each for each in folders if f"{each.relative_to(ROOT)}" not in MAP and f"`{each.name}/`" not in MAP]
    assert len(PATHS) > 40
    assert not missing


def test_imports_point_down_and_have_no_circle():
    graph = packages.imports(ROOT)
    assert {"layers", "ops"} <= graph["rl"] | graph["layers"]
    assert "numerics" in graph["ops"]
    assert packages.faults(graph) == []


def test_the_map_shows_the_graph_of_the_imports():
    assert packages.mermaid(packages.imports(ROOT)).strip() in MAP


def test_imports_that_point_up_or_in_a_circle_are_found(tmp_path):
    files = dict.fromkeys(("__init__.py", "ops/__init__.py", "layers/__init__.py", "layers/linear.py"), "")
    files |= {"ops/inner.py": "def late():\n    from ..layers.linear import Linear"}
    files |= {"stats.py": "from hf_mxfp4 import config", "config.py": "import hf_mxfp4.stats"}
    for name, text in files.items():
        (tmp_path / "hf_mxfp4" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hf_mxfp4" / name).write_text(text)
    up, circle = packages.faults(packages.imports(tmp_path))
    assert up.startswith("ops imports layers, which is above it")
    assert "import each other in a circle" in circle


#: Python tokens, and words of the docs without tables of records; see `benchmarks.packages`.
LIMITS = {
    "hf_mxfp4 without lab": 170_900,
    "hf_mxfp4/lab": 33_200,
    "kernels": 29_900,
    "recipes": 38_050,
    "benchmarks": 40_400,
    "tests": 334_100,
    "docs (words)": 18_700,
}
SIZES = packages.sizes(ROOT)


def test_tokens_count_statements_but_no_comments_docstrings_and_layout():
    source = 'def area(r):\n    """Return it."""\n\n    # a comment\n    return (\n        3 * r\n    )\n'
    assert packages.tokens(source) == len("def area ( r ) : return ( 3 * r )".split())


@pytest.mark.parametrize("package", LIMITS)
def test_a_package_is_within_its_limit(package):
    assert 100 < SIZES[package] <= LIMITS[package], f"delete something in {package}, or raise its limit and say why"
