# SPDX-License-Identifier: Apache-2.0
"""What a model says of a case that was measured, to stand beside the measurement and never in its place."""

import functools

from .. import records


#: Of the kernels as they are, first; otherwise as they were.
STATES = ("now", "before")


def modelled(record: dict) -> dict | None:
    """The modelled record of a measured case, on a GPU of the same name; `None` where there is none."""
    gpus = [gpu for gpu, *_ in _all() if gpu in record.get("hardware", "")]
    shape = tuple(record["shape"]) if isinstance(record["shape"], list) else ()
    found = (_all().get((gpu, state, record["name"], shape)) for state in STATES for gpu in gpus)
    return next((one for one in found if one is not None), None)


def beside(record: dict) -> str:
    """In words: ``"modelled 74 %, 2.9x"``; empty where there is nothing."""
    found = modelled(record)
    if found is None:
        return ""
    ratio = "" if found["ratio"] is None else f", {found['ratio']:.2f}x {found['baseline']}"
    return f"modelled {100 * found['ceiling_fraction']:.0f} % of ceiling{ratio}"


@functools.lru_cache(maxsize=1)
def _all() -> dict[tuple, dict]:
    """By GPU, state, name and shape."""
    if not (records.RESULTS / f"{records.MODELLED}.json").exists():
        return {}
    found = records.records(records.MODELLED, modelled=True)
    return {(r["gpu"], r["state"], r["name"], tuple(r["shape"])): r for r in found if r["status"] == "ok"}
