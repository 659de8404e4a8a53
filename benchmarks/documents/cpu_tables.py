# SPDX-License-Identifier: Apache-2.0
"""Tables of the speed on CPUs: products with packed weights, `generate`, and GRPO steps."""

from collections.abc import Iterator

from ..records import records, table


#: Of a GRPO step, in their order.
PHASES = (
    "generation", "scoring", "log-probabilities", "forward", "backward", "optimizer", "callbacks", "logging", "rest",
)  # fmt: skip


def packed_product_cpu() -> str:
    parts = []
    machines = ("packed_product_cpu", "packed_product_cpu_amx")
    for variant, found in (group for machine in machines for group in _groups(machine, "variant")):
        names = list(dict.fromkeys(r["name"] for r in found))
        cells: dict[tuple, dict[str, str]] = {}
        for r in found:
            m, n, k = r["shape"]
            text = f"{r['value']:.2f}" if r["ratio"] == 1 else f"{r['value']:.2f} ({r['ratio']:.2f})"
            cells.setdefault((f"{n} x {k}", m, r["threads"]), {})[r["name"]] = text
        rows = [[*map(str, key), *(own.get(name, "") for name in names)] for key, own in cells.items()]
        parts.append(f"{table(['N x K', 'rows', 'threads', *names], rows)}\nCompiled as {variant}. {_origin(found)}\n")
    return "\n".join(parts)


def generate_cpu() -> str:
    parts = []
    for model, found in _groups("generate_cpu", "model"):
        cells: dict[str, dict[tuple[int, int], str]] = {}
        for r in found:
            ratios = ", ".join(f"{r[key]:.2f}" for key in ("ratio", "cpu_ratio") if key in r)
            cells.setdefault(r["name"], {})[r["threads"], r["batch"]] = f"{r['value']:.1f} ({ratios})"
        settings = sorted({(r["threads"], r["batch"]) for r in found})
        columns = [f"{threads} thread{'s' * (threads > 1)}, batch {batch}" for threads, batch in settings]
        rows = [[name, *(own.get(setting, "") for setting in settings)] for name, own in cells.items()]
        _, prompt, tokens = found[0]["shape"]
        what = f"{model}: {tokens} new tokens after {prompt}. {_origin(found)}"
        parts.append(f"{table(['', *columns], rows)}\n{what}\n")
    return "\n".join(parts)


def grpo_step_cpu() -> str:
    parts = []
    for model, found in _groups("grpo_step_cpu", "model"):
        phases = [phase for phase in PHASES if any(_cpu(r, phase) >= 0.005 for r in found)]
        rows = []
        for r in found:
            times = [
                f"{r[key]:.2f} ({1 / r[ratio]:.2f})" for key, ratio in (("value", "ratio"), ("cpu_value", "cpu_ratio"))
            ]
            rows.append([r["name"], *times, *(f"{_cpu(r, phase):.2f}" for phase in phases)])
        completions, tokens = found[0]["shape"]
        columns = ["", "seconds a step", "CPU seconds", *(f"{phase}, CPU s" for phase in phases)]
        what = f"{model}: {completions} completions of {tokens} tokens a step. {_origin(found)}"
        parts.append(f"{table(columns, rows)}\n{what}\n")
    return "\n".join(parts)


def _cpu(record: dict, phase: str) -> float:
    return record["phases"].get(phase, (0.0, 0.0))[1]


def _groups(name: str, key: str) -> Iterator[tuple[str, list[dict]]]:
    """The records of a name by one of their entries, in the order of the file."""
    found = records(name)
    for value in dict.fromkeys(r[key] for r in found):
        yield value, [r for r in found if r[key] == value]


def _origin(found: list[dict]) -> str:
    """Machine and date of some records."""
    return f"{max(found, key=lambda r: r['threads'])['hardware']}, {found[0]['date']}"
