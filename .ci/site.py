# SPDX-License-Identifier: Apache-2.0
"""What mkdocs adds to the pages in docs: files from the top of the project, and the API reference by package."""

import ast
import json
import re
from pathlib import Path

import griffe
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


TOP = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md"}
#: Packages of the API reference.
PACKAGES = (
    "hf_mxfp4",
    "hf_mxfp4.rl",
    "hf_mxfp4.layers",
    "hf_mxfp4.numerics",
    "hf_mxfp4.checkpoint",
    "hf_mxfp4.integrations.peft",
    "hf_mxfp4.lab",
    "mxfp4_kernels",
)


class OptionHelp(griffe.Extension):
    """Gives the options of configs the help that they are defined with, and their default."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: object) -> None:
        """Read `option(default, help)`."""
        value = attr.value
        if attr.path.startswith("hf_mxfp4.recipes"):
            return  # no page has them
        if isinstance(value, griffe.ExprCall) and str(value.function).lstrip("_") == "option":
            attr.value, text = value.arguments[:2]
            if isinstance(text, str):  # not where help is composed, as that of `preset`
                attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)


class PlainNames(Preprocessor):
    """Shows the [`names`] of docstrings, which editors link, as code."""

    def run(self, lines: list[str]) -> list[str]:
        """Return lines without the brackets."""
        return [
            re.sub(r"\[(`[^`]+`)\](\((hf_mxfp4|mxfp4_kernels)\.[\w.]+\)|(?![(\[:]))", r"\1", line) for line in lines
        ]


class NamesExtension(Extension):
    """Enters [`PlainNames`]."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the preprocessor, behind that of fenced code."""
        md.preprocessors.register(PlainNames(md), "plain_names", 10)


def notebook(path: Path) -> str:
    """Return a notebook as Markdown, with what its cells print."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", ()))
        parts += [f"```text\n{printed}```"] if printed else []
    return "\n\n".join(parts)


def public_names(package: Path) -> list[str]:
    """Return the names that a package's stub, or else the package, imports from submodules."""
    stub = package / "__init__.pyi"
    source = stub if stub.exists() else package / "__init__.py"
    imports = [each for each in ast.parse(source.read_text()).body if isinstance(each, ast.ImportFrom)]
    return sorted(name.name for each in imports if each.level == 1 and each.module for name in each.names)


def on_config(config: MkDocsConfig) -> None:
    """Add the extension of Markdown."""
    config.markdown_extensions.append(NamesExtension())


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are no files in docs."""
    pages = {page: Path(source).read_text().replace("](docs/", "](") for page, source in TOP.items()}
    pages["index.md"] = pages["index.md"].replace("quickstart.ipynb", "quickstart.md")
    pages["quickstart.md"] = notebook(Path("docs/quickstart.ipynb")).replace("../README.md", "index.md")
    for name in PACKAGES:
        root = Path("kernels" if name == "mxfp4_kernels" else ".") / name.replace(".", "/")
        members = public_names(root)
        text = f"# {name}\n\n::: {name}\n    options: {{members: {json.dumps(members)}}}\n"
        for member in members:
            if (root / f"{member}.py").exists():  # a function that shares its module's name, which hides it
                text += f"\n::: {name}.{member}.{member}\n    options: {{show_root_heading: true}}\n"
        pages[f"api/{name}.md"] = text
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
