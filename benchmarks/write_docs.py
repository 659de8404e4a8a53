# SPDX-License-Identifier: Apache-2.0
"""Put the measured numbers into the documents: tables between their markers, and plots.

    python -m benchmarks.write_docs           # after a benchmark has written new records
    python -m benchmarks.write_docs --check   # exit code 1 when a table is not that of the records

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; its text comes from `benchmarks/results/*.json` alone.
"""

import argparse
import re
import sys
from collections.abc import Callable

from .documents import (
    ablation_tables,
    architecture_tables,
    component_tables,
    cpu_tables,
    error_tables,
    evidence_tables,
    gpu_tables,
    model_tables,
    run_tables,
)
from .records import PLOTS, ROOT


DOCUMENTS = (
    "README.md",
    "docs/backward.md",
    "docs/configuration.md",
    "docs/error-analysis.md",
    "docs/evidence.md",
    "docs/gguf.md",
    "docs/gptq.md",
    "docs/checkpoints.md",
    "docs/lora.md",
    "docs/models.md",
    "docs/moe.md",
    "docs/performance.md",
    "docs/robustness.md",
    "docs/smoothing.md",
    "docs/ties.md",
    "docs/vllm.md",
)
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: Table by the name in its marker.
TABLES: dict[str, Callable[[], str]] = {
    name: getattr(module, name)
    for module, names in (
        (
            error_tables,
            "schemes tie_movement tie_start mantissas alphas components statements readme_schemes",
        ),
        (
            run_tables,
            "quantize_cpu demo lora moe memory saved_error pretrain soak "
            "export_perplexity gguf_perplexity scheme_perplexity scheme_perplexity_time smoothing "
            "layer_host_cost vllm_agreement",
        ),
        (cpu_tables, "packed_product_cpu generate_cpu grpo_step_cpu"),
        (gpu_tables, "gpu"),
        (model_tables, "modelled"),
        (
            evidence_tables,
            "readme_evidence evidence_schemes evidence_front evidence_claims encoder_evidence gptq",
        ),
        (component_tables, "evidence_components evidence_predictors"),
        (architecture_tables, "architectures"),
        (ablation_tables, "ablation ablation_claims ablation_diagnostics"),
    )
    for name in names.split()
}


def filled(text: str) -> str:
    """A document with the tables that the records say."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        if filled(text) != text:
            stale.append(name)
            if not check:
                path.write_text(filled(text))
    if check:
        sys.exit(f"not what the records say: {', '.join(stale)}" if stale else 0)
    from .documents.plots import draw_all

    draw_all(PLOTS)


if __name__ == "__main__":
    main()
