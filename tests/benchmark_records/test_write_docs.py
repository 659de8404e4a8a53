# SPDX-License-Identifier: Apache-2.0
"""The numbers in the documents are those of the committed records, and every record says how it was made."""

import json
import re

import pytest

from benchmarks import write_docs
from benchmarks.records import RESULTS


@pytest.mark.parametrize("name", write_docs.DOCUMENTS)
def test_the_tables_are_those_of_the_records(name):
    text = (write_docs.ROOT / name).read_text()
    assert write_docs.MARKED.search(text), "no table"
    assert write_docs.filled(text) == text, "run `python -m benchmarks.write_docs`"


def test_a_changed_number_is_noticed():
    text = (write_docs.ROOT / "docs" / "error-analysis.md").read_text()
    changed = text.replace("| rceil | 1.3", "| rceil | 1.2", 1)
    assert changed != text and write_docs.filled(changed) == text


def test_every_table_is_shown_somewhere():
    shown = {
        match[2]
        for name in write_docs.DOCUMENTS
        for match in write_docs.MARKED.finditer((write_docs.ROOT / name).read_text())
    }
    assert shown == set(write_docs.TABLES)


def test_plots_that_are_linked_exist():
    for name in write_docs.DOCUMENTS:
        path = write_docs.ROOT / name
        for link in re.findall(r"\]\(([^)]*\.(?:svg|png))\)", path.read_text()):
            assert (path.parent / link).is_file(), link


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_records_say_what_made_them(path):
    records = json.loads(path.read_text())
    assert records
    for record in records:
        for key in ("name", "shape", "value", "unit", "hardware", "versions", "command", "date"):
            assert record.get(key) is not None, (key, record)
        assert {"baseline", "ratio", "ceiling_fraction"} <= record.keys()
