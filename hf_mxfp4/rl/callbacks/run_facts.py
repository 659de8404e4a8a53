# SPDX-License-Identifier: Apache-2.0
"""What a run report says about a run besides its numbers."""

from dataclasses import MISSING, fields
from typing import Any

from torch import nn
from transformers import Trainer

from ...environment import machine, package_versions


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """Model, scheme, counts of layers, every option (tokens blanked out) and which differ from their defaults,
    versions and machine; JSON-clean."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    report = getattr(model, "quantization_report", None)
    config = getattr(model.config, "quantization_config", None)
    options = trainer.args.to_dict()
    return {
        "model": getattr(model.config, "_name_or_path", "") or type(model).__name__,
        "architecture": type(model).__name__,
        "parameters": count_parameters(model),
        "trained_parameters": sum(_size(p) for p in model.parameters() if p.requires_grad),
        "scheme": report.scheme if report else "full precision",
        "n_quantized": trainer.n_quantized,
        "n_skipped": report.n_skipped if report else None,
        "skipped": list(report.skipped[:8]) if report else [],
        "weight_sqnr_db": report.sqnr_db if report else None,
        "train_rows": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
        "options": options,
        "changed_options": _changed(trainer.args, options),
        "quantization": config.to_dict() if hasattr(config, "to_dict") else config,
        "processes": trainer.args.world_size,
        "device": str(trainer.args.device),
        "distributed": str(trainer.accelerator.distributed_type).removeprefix("DistributedType."),
        "precision": trainer.accelerator.mixed_precision,
        "versions": package_versions(),
        "machine": machine(),
    }


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, those of packed weights included: the elements that they stand for, and not the bytes
    that hold them, which transformers' `num_parameters` counts."""
    report = getattr(model, "quantization_report", None)
    if report is None or report.packed_bytes is None:
        return sum(_size(parameter) for parameter in model.parameters())
    return report.n_weights + sum(_size(p) for p in model.parameters() if p.is_floating_point())


def _size(parameter: nn.Parameter) -> int:
    # Under ZeRO-3 the shape of a parameter that is sharded away is empty.
    return getattr(parameter, "ds_numel", parameter.numel())


def _changed(args: Any, options: dict[str, Any]) -> list[str]:
    """Names of the options whose values are not their defaults."""
    changed = []
    for option in fields(args):
        default = option.default_factory() if option.default_factory is not MISSING else option.default
        if option.init and option.name in options and getattr(args, option.name) != default:
            changed.append(option.name)
    return changed
