# SPDX-License-Identifier: Apache-2.0
"""Put the measured numbers into the documents: tables between their markers, and plots.

    python -m benchmarks.write_docs           # after a benchmark has written new records
    python -m benchmarks.write_docs --check   # exit code 1 when a table is not that of the records

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a number of a sentence between `<!-- value: NAME -->`
and `<!-- end -->`; their text comes from `benchmarks/results/*.json` alone.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from .documents import errors, evidence, gpu, prepared, runs
from .documents.values import VALUES
from .documents.verdicts import verdicts
from .records import PLOTS, ROOT


MARKED = re.compile(r"(<!-- (?:table|value): (\w+) -->\n?).*?(<!-- end -->)", re.DOTALL)

#: Functions that make tables. A marker has the name of one, or of one of `VALUES`.
_FUNCTIONS = (
    errors.presets,
    errors.schemes,
    errors.statements,
    errors.readme_schemes,
    evidence.readme_evidence,
    evidence.evidence_front,
    evidence.evidence_claims,
    evidence.tensor_cores,
    evidence.gemma,
    evidence.gptq,
    prepared.preparation,
    prepared.distillation,
    runs.demo,
    runs.memory,
    runs.pretrain,
    runs.architectures,
    runs.two_points,
    runs.two_points_rates,
    runs.steps,
    runs.steps_mismatch,
    runs.second_decoder,
    runs.second_decoder_rates,
    verdicts,
    runs.recovery,
    gpu.gpu,
    gpu.decode_modelled,
    gpu.training_modelled,
    gpu.host_time,
)
TABLES: dict[str, Callable[[], str]] = {function.__name__: function for function in _FUNCTIONS} | VALUES


def documents() -> list[Path]:
    """Return the documents that have tables."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return [page for page in pages if MARKED.search(page.read_text())]


def filled(text: str) -> str:
    """Return a document with the tables that the records say."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path in documents():
        text = path.read_text()
        if filled(text) != text:
            stale.append(path.name)
            if not check:
                path.write_text(filled(text))
    if check:
        sys.exit(f"not what the records say: {', '.join(stale)}" if stale else 0)
    from .documents.plots import draw_all

    draw_all(PLOTS)


if __name__ == "__main__":
    main()
