# SPDX-License-Identifier: Apache-2.0
"""The quickstart notebook runs from top to bottom, and says what it promises."""

import json
import math
import os
import re
from pathlib import Path

import processes
import pytest


ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
#: Runs all cells in one namespace, with fewer steps of training; its last line is JSON: how many ran, and the values
#: of expressions.
RUN = """
import json, sys
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
names = {"__name__": "__main__"}
for number, cell in enumerate(cells, start=1):
    source = "".join(cell["source"]).replace("max_steps=20", "max_steps=8")
    exec(compile(source, f"<cell {number}>", "exec"), names)
print("\\n" + json.dumps({"cells": len(cells), **{text: eval(text, names) for text in sys.argv[2:]}}))
"""
#: What is looked at when all cells have run.
RESULTS = {
    "loaded": "config.describe()",
    "parameters": "base.num_parameters()",
    "errors": "squared_errors",
    "kl": "{row.name: row.kl.value for row in measured if row.scheme}",
    "perplexity": "[row.perplexity for row in measured]",
    "history": "[[entry[key] for key in ('reward', 'entropy', 'grad_norm')] for entry in history]",
    "noise": "max(entry['aqn/sigma'] for entry in history)",
    "right": "right_answers",
    "quantized": "trainer.n_quantized",
    "difference": "difference",
    "same": "complete(reloaded) == complete(packed) == trained",
    "bits": "stored.bits_per_weight",
    "packed": "stored.n_quantized",
    "sizes": "sizes",
    "refusal": "refusal",
    "exported": "sorted(path.name for path in (FOLDER / 'exported').iterdir())",
    "report": "(FOLDER / 'run' / 'run_report.html').stat().st_size",
}


def cells():
    return json.loads(NOTEBOOK.read_text())["cells"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("quickstart")), "HF_HUB_OFFLINE": "1"}
    job = processes.code(RUN, str(NOTEBOOK), *RESULTS.values())
    done = processes.run(job, environment=environment)
    assert done.returncode == 0, done.output[-4000:]
    values = json.loads(done.stdout.strip().splitlines()[-1])
    return {"cells": values["cells"], **{name: values[text] for name, text in RESULTS.items()}}


def test_every_cell_ran_in_mxfp4_and_was_measured(found):
    assert found["cells"] == sum(cell["cell_type"] == "code" for cell in cells()) >= 9
    # Seven layers in each of two blocks.
    assert found["quantized"] == found["packed"] == 14
    assert found["bits"] == 4.3125
    assert "w4a8 [weights mxfp4+even+mbs128-blockwise_fp8, activations fp8]" in found["loaded"]
    assert found["parameters"] < 350_000
    errors = found["errors"]
    assert errors["outlier fallback"] < errors["block mantissas"] < errors["macro blocks"] < errors["plain MXFP4"] < 2
    assert 0 < found["kl"]["default"] < found["kl"]["rceil"] < 0.1
    # Of 14 characters: where a model that had learnt nothing would be.
    assert all(1 < value < 4 for value in found["perplexity"])


def test_it_trained(found):
    assert len(found["history"]) == 8
    assert all(math.isfinite(value) for entry in found["history"] for value in entry)
    assert found["noise"] == pytest.approx(0.01)
    assert min(gradient for *_, gradient in found["history"]) > 0
    assert all(50 <= right <= 100 for right in found["right"])
    assert found["right"][0] != found["right"][1]
    assert found["report"] > 10_000


def test_what_it_saved(found):
    sizes = found["sizes"]
    assert found["same"]
    assert found["difference"] < 1e-4
    # Float32 is 32 bits a weight, packed 4.31 and exported 4.25, beside embeddings, head and norms in float32.
    assert sizes["exported"] < sizes["packed"] < sizes["base"] / 3
    assert sizes["base"] == pytest.approx(sizes["policy"], rel=0.01)
    assert "cannot hold 14 of 14 layers" in found["refusal"]
    assert {"config.json", "model.safetensors", "export_report.json"} <= set(found["exported"])


def test_it_shows_what_its_cells_print():
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    prints = [cell for cell in code if re.search(r"^ *print\(", "".join(cell["source"]), re.M)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert len(prints) == 9
    assert all(cell["outputs"] for cell in prints)
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 1
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert "4.31 bits for each weight of 14 layers" in text
    assert "refused: format 'compressed-tensors'" in text
