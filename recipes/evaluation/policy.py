# SPDX-License-Identifier: Apache-2.0
"""The policy to evaluate, under the scheme that it carries or as a control of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint.manifest import record_of
from hf_mxfp4.recipes.common.checkpoints import Stored, load_tokenizer, load_whole, read_stored
from hf_mxfp4.rl.config import count_quantized

from .arguments import CONTROLS, EvaluationArguments
from .results import RESULT_FILE, digest


@dataclass(frozen=True)
class Policy:
    """A loaded model, and what it computes in.

    Attributes:
        identity: what tells these weights from others.
        description: for the result file: ``model`` (folder or Hub id as asked for), ``adapter_on`` (the base of an
            adapter), ``scheme`` (that the checkpoint carries), ``control`` (what stands in its place), ``computed_in``
            (the two in a line), ``dtype``, ``attention`` (the implementation that is used), ``n_quantized`` and
            ``n_skipped`` (linear maps in MXFP4, and those left in full precision, as they are computed here), and
            ``weight_sqnr_db`` (`None` when there are none or their originals are gone).
    """

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    identity: str
    description: dict[str, Any]


def read_tokenizer(options: EvaluationArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a policy alone; raises as [`load_policy`] does."""
    trust = {"trust_remote_code": options.trust_remote_code}
    return load_tokenizer(read_stored(options.model, revision=options.revision, base=options.base, **trust), **trust)


def load_policy(options: EvaluationArguments, device: torch.device | str = "cpu") -> Policy:
    """Load a policy, packed weights, an adapter or a plain model.

    With ``options.dequantize``, a key of `CONTROLS`, without its scheme. Otherwise under the scheme in its
    configuration; an adapter under that of its base or, when the base has none, the one that it was trained on.

    Raises:
        OSError: nothing to load.
        ValueError: a control of a model without a scheme, of packed weights' masters, or a scheme under which nothing
            was quantized.
    """
    control = options.dequantize
    trust = {"trust_remote_code": options.trust_remote_code}
    stored = read_stored(options.model, revision=options.revision, base=options.base, **trust)
    model = _load_model(stored, options)

    # A control may have the report of the layers that it no longer has.
    n_quantized = 0
    n_skipped = None
    weight_sqnr_db = None
    report = getattr(model, "quantization_report", None)
    if report is not None and control is None:
        n_quantized = report.n_quantized
        n_skipped = report.n_skipped
        weight_sqnr_db = report.sqnr_db

    identities = [_identity(stored.weights, getattr(stored.config, "_commit_hash", None))]
    adapter_on = None
    if stored.adapter is not None:
        model = PeftModel.from_pretrained(model, stored.source, revision=stored.source_revision)
        identities.append(_identity(stored.source, stored.adapter_folder.name))
        adapter_on = stored.weights

    dtype = str(model.dtype).removeprefix("torch.")
    scheme = None
    if stored.scheme is not None:
        scheme = stored.scheme.describe()
    elif stored.quantization:
        scheme = f"{stored.quantization['quant_method']} (by transformers)"
    control_name = None
    if control is not None:
        control_name = CONTROLS[control]
        computed_in = f"CONTROL: {control_name} ({dtype}), nothing quantized; own scheme: {scheme}"
    else:
        computed_in = scheme or f"full precision ({dtype}); the checkpoint carries no scheme"
    return Policy(
        model=model.to(device).eval(),
        tokenizer=load_tokenizer(stored, **trust),
        identity="+".join(identities),
        description={
            "model": stored.source,
            "adapter_on": adapter_on,
            "scheme": scheme,
            "control": control_name,
            "computed_in": computed_in,
            "dtype": dtype,
            "attention": getattr(model.config.get_text_config(), "_attn_implementation", None),
            "n_quantized": n_quantized,
            "n_skipped": n_skipped,
            "weight_sqnr_db": weight_sqnr_db,
        },
    )


def _load_model(stored: Stored, options: EvaluationArguments) -> PreTrainedModel:
    """Load the whole weights under their scheme or as a control; check that it is what it is called."""
    scheme = stored.scheme
    control = options.dequantize
    _check_control(control, stored)
    loaded_under: MXFP4RLConfig | str | None = scheme
    if control == "masters":
        loaded_under = None
    elif stored.quantization:
        loaded_under = "own"
    model = load_whole(
        stored,
        loaded_under,
        dtype=options.dtype,
        attn_implementation=options.attn_implementation,
        trust_remote_code=options.trust_remote_code,
    )
    if scheme is not None and control != "masters" and not count_quantized(model):
        raise ValueError(
            f"{stored.source} carries the scheme {scheme.describe()}, but not one layer of {type(model).__name__} was "
            "quantized: what would be measured is full precision"
        )
    if control == "quantized":
        model = model.dequantize()
    if control is not None and count_quantized(model):
        raise ValueError(f"{stored.source} still has quantized layers, so that it is no control in full precision")
    return model


def _check_control(control: str | None, stored: Stored) -> None:
    """Raise `ValueError` for a control that a checkpoint does not have."""
    if control is not None and stored.scheme is None:
        raise ValueError(
            f"{stored.weights} carries no MXFP4 scheme, so there is nothing to dequantize: leave --dequantize out"
        )
    if control == "masters" and stored.scheme.mode == "packed" and stored.quantization:
        raise ValueError(
            f"{stored.weights} holds packed weights alone, its master weights are gone: evaluate the checkpoint that "
            "it was packed from, or the same 4-bit weights in full precision with --dequantize quantized"
        )


def _identity(name: str, commit: str | None) -> str:
    """Return a digest of a local folder, the commit of a Hub repository."""
    folder = Path(name)
    if folder.is_dir():
        return folder_digest(folder)
    return f"{name}@{commit}"


def folder_digest(folder: Path) -> str:
    """Return a SHA-256 (12 digits) of a checkpoint's configuration, tokenizer and weights, which survives a copy."""
    found = {path for ending in ("safetensors", "bin", "json", "jinja") for path in folder.glob(f"*.{ending}")}
    files = sorted(path for path in found if path.is_file() and path.name != RESULT_FILE)
    return digest([[path.name, record_of(path).xxh3_128] for path in files])
