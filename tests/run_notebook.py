# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of a notebook, one after the other in one namespace, and says what became of it.

    python tests/run_notebook.py NOTEBOOK EXPRESSION ...

The last line is JSON: the number of cells that ran, and the value of each expression.
"""

import json
import sys
from pathlib import Path


def main(path: str, *expressions: str) -> None:
    cells = [cell for cell in json.loads(Path(path).read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells, start=1):
        exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
    print("\n" + json.dumps({"cells": len(cells), **{text: eval(text, names) for text in expressions}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
