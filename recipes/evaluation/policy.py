# SPDX-License-Identifier: Apache-2.0
"""The policy to evaluate, under the scheme that it carries or as a control of it."""

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_mxfp4.checkpoint import remove_scheme
from hf_mxfp4.layers import QUANTIZED
from recipes.common.schemes import preset_of
from recipes.common.stored import Stored, load_tokenizer, method, read_stored

from .results import RESULT_FILE


#: What `--dequantize` can leave out of the scheme; neither control quantizes activations.
CONTROLS = {
    "masters": "full precision on the master weights",
    "quantized": "full precision on the dequantized weights",
}
#: Bytes of each file that count for the digest: so many pieces, evenly spaced.
_PIECES, _PIECE_BYTES = 64, 1 << 16


@dataclass(frozen=True)
class Policy:
    """A loaded model, and what it computes in.

    Attributes:
        preset: which preset its scheme is, or what differs from one; `None` without a scheme of this package.
        identity: what tells these weights from others.
        description: for the result file: ``model`` (folder or Hub id as asked for), ``adapter_on`` (the base of an
            adapter), ``scheme`` (that the checkpoint carries), ``control`` (what stands in its place), ``computed_in``
            (the two in a line), ``dtype``, ``attention`` (the implementation that is used), ``n_quantized`` and
            ``n_skipped`` (linear maps in MXFP4, and those left in full precision, as they are computed here), and
            ``weight_sqnr_db`` (`None` when there are none or their originals are gone).
    """

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    preset: str | None
    identity: str
    description: dict[str, Any]


def load_policy(
    source: str,
    *,
    control: str | None = None,
    base: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
) -> Policy:
    """Load a policy, packed weights, an adapter or a plain model.

    Args:
        source: a folder or a Hub id.
        control: `None`: under the scheme in its configuration (an adapter: in that of its base or, when the base has
            none, the one that the adapter was trained on). A key of `CONTROLS`: without.
        base: what an adapter belongs on, instead of the model that its configuration names.
        dtype: of the weights; ``"auto"``: as stored.
        revision, attn_implementation, trust_remote_code: as in `from_pretrained`.

    Raises:
        OSError: nothing to load.
        ValueError: a control of a model without a scheme, of packed weights' masters, or a scheme under which nothing
            was quantized.
    """
    source = str(Path(source).expanduser()) if source.startswith("~") else source
    stored = read_stored(source, revision=revision, base=base, trust_remote_code=trust_remote_code)
    scheme = stored.scheme
    _check_control(control, stored)

    options: dict[str, Any] = {}
    if control == "masters":
        options["config"] = copy.deepcopy(stored.config)
        remove_scheme(options["config"])
    elif scheme is not None and not stored.quantization:
        options["quantization_config"] = scheme
    model = AutoModelForCausalLM.from_pretrained(
        stored.weights,
        revision=stored.revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        **options,
    )
    report = getattr(model, "quantization_report", None)
    if scheme is not None and control != "masters" and (report is None or not _quantized_layers(model)):
        raise ValueError(
            f"{source} carries the scheme {scheme.describe()}, but not one layer of {type(model).__name__} was "
            "quantized: what would be measured is full precision"
        )
    if control == "quantized":
        model = model.dequantize()
    if control is not None and _quantized_layers(model):
        raise ValueError(f"{source} still has quantized layers, so that it is no control in full precision")
    identities = [_identity(stored.weights, getattr(stored.config, "_commit_hash", None))]
    if stored.adapter is not None:
        model = PeftModel.from_pretrained(model, source, revision=revision)
        identities.append(_identity(source, stored.adapter_folder.name))
    dtype = str(model.dtype).removeprefix("torch.")
    own = scheme.describe() if scheme else None
    if scheme is None and stored.quantization:
        own = f"{method(stored.quantization)} (by transformers)"
    if control is not None:
        report, computed_in = None, f"CONTROL: {CONTROLS[control]} ({dtype}), nothing quantized; own scheme: {own}"
    else:
        computed_in = own or f"full precision ({dtype}); the checkpoint carries no scheme"
    return Policy(
        model=model.to(device).eval(),
        tokenizer=load_tokenizer(source, stored, revision=revision, trust_remote_code=trust_remote_code),
        preset=None if scheme is None else preset_of(scheme),
        identity="+".join(identities),
        description={
            "model": source,
            "adapter_on": None if stored.adapter is None else stored.weights,
            "scheme": own,
            "control": control and CONTROLS[control],
            "computed_in": computed_in,
            "dtype": dtype,
            "attention": getattr(model.config.get_text_config(), "_attn_implementation", None),
            "n_quantized": report.n_quantized if report else 0,
            "n_skipped": report.n_skipped if report else None,
            "weight_sqnr_db": report.sqnr_db if report else None,
        },
    )


def _check_control(control: str | None, stored: Stored) -> None:
    if control is not None and stored.scheme is None:
        raise ValueError(
            f"{stored.weights} carries no MXFP4 scheme, so there is nothing to dequantize: evaluate it without "
            "--dequantize"
        )
    if control == "masters" and stored.scheme.mode == "packed" and stored.quantization:
        raise ValueError(
            f"{stored.weights} holds packed weights alone, its master weights are gone: evaluate the checkpoint that "
            "it was packed from, or the same 4-bit weights in full precision with --dequantize quantized"
        )


def _quantized_layers(model: nn.Module) -> int:
    return sum(isinstance(module, QUANTIZED) for module in model.modules())


def _identity(name: str, commit: str | None) -> str:
    """A digest of a local folder, the commit of a Hub repository."""
    folder = Path(name)
    return folder_digest(folder) if folder.is_dir() else f"{name}@{commit}"


def folder_digest(folder: Path) -> str:
    """Return a SHA-256 (12 digits) of a checkpoint's configuration and tokenizer and of evenly spaced pieces of its
    weights: it changes with training, costs no time, and survives a copy. The result of an evaluation that was written
    into the folder does not count."""
    digest = hashlib.sha256()
    found = {path for ending in ("safetensors", "bin", "json") for path in folder.glob(f"*.{ending}")}
    for path in sorted(found - {folder / RESULT_FILE}):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        starts = range(0, size, _PIECE_BYTES)
        if size > _PIECES * _PIECE_BYTES:
            starts = [(size - _PIECE_BYTES) * piece // (_PIECES - 1) for piece in range(_PIECES)]
        with path.open("rb") as file:
            for start in starts:
                file.seek(start)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]
