# SPDX-License-Identifier: Apache-2.0
"""The callback that watches the routers of a mixture of experts while it trains."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import TrainerCallback

from ..._logging import get_logger
from ...lab import router_statistics
from ...layers import full_precision
from ...moe import find_routers


#: In the output folder: one line of JSON for each measurement of each router.
ROUTER_FILE = "routers.jsonl"


class RouterCallback(TrainerCallback):
    """Measures what quantization does to the routing, and how evenly the experts are used, on the last training batch.

    Metrics, means over the routers: `router/agreement` (share of the choices that full precision would make too),
    `router/load_entropy`, `router/load_max_over_mean`, `router/dead_experts`; and `router/agreement_min_layer`, the
    least agreement of a router. See [`hf_mxfp4.lab.RouterStatistics`]. The agreement is left out, with a warning,
    for a model without master weights in full precision or without quantized layers.

    Args:
        model: the policy.
        every: steps between measurements; also measured after the last one.
        batch: gives token ids and attention mask ``[batch, length]`` of the last training batch.
        record: called with a metric's name and value, normally the trainer's log.

    Attributes:
        history: one dictionary per measurement and router: `step`, `layer` and its statistics. Also written, line by
            line, to `routers.jsonl` in the output folder, by the main process.

    Raises `ValueError` when the model has no router.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        record: Callable[[str, float], None],
    ):
        self.every, self.batch, self.record = every, batch, record
        self.history: list[dict] = []
        count = len(find_routers(model))
        try:
            with full_precision(model):
                self.compares = True
        except ValueError as reason:
            self.compares = False
            get_logger().warning("the load of the experts is measured, router agreement is not: %s", reason)
        get_logger().info("router telemetry: %d routers every %d steps", count, every)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        measured = router_statistics(model, *self.batch(), compare=self.compares)
        rows = [statistics.to_dict() for statistics in measured]
        for name in ("agreement", "load_entropy", "load_max_over_mean", "dead_experts"):
            values = [row[name] for row in rows if row[name] is not None]
            if values:
                self.record(f"router/{name}", sum(values) / len(values))
        if self.compares:
            self.record("router/agreement_min_layer", min(row["agreement"] for row in rows))
        entries = [{"step": state.global_step, "layer": row.pop("name"), **row} for row in rows]
        self.history += entries
        if state.is_world_process_zero:
            with open(Path(args.output_dir) / ROUTER_FILE, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
