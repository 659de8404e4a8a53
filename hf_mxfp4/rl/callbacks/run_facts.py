# SPDX-License-Identifier: Apache-2.0
"""What is said about a run besides its numbers: the facts of its report, and the card of its folder."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from ...environment import machine, package_versions
from ...files import replace_file


#: What TRL's template makes of a base model, and of a repository, that has no name on the Hub.
_NO_BASE, _NO_REPOSITORY = "[None](https://huggingface.co/None)", 'model="None"'
_PIPELINE = "from transformers import pipeline\n"


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


def mend_card(path: Path, base: str, quantized: bool) -> None:
    """Rewrite the card (`README.md`) that TRL writes into a run's folder, without links to what does not exist: what
    was trained in the place of ``None``, and the import that MXFP4 layers need.

    Args:
        base: name of a local model, or of a class where the model has none.
        quantized: whether the policy has MXFP4 layers.
    """
    text = path.read_text(encoding="utf-8")
    text = text.replace(_NO_BASE, f"the local model `{base}`")
    text = text.replace(_NO_REPOSITORY, 'model="path/to/this/model"')
    if quantized:
        text = text.replace(_PIPELINE, f"import hf_mxfp4  # the layers\n{_PIPELINE}")
    replace_file(path, text)
