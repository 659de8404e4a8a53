# SPDX-License-Identifier: Apache-2.0
"""The policy to evaluate, under the scheme that it carries or as a control of it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import remove_scheme
from hf_mxfp4.config import QUANT_METHOD
from hf_mxfp4.layers import QUANTIZED

from .results import RESULT_FILE


#: What `--dequantize` can leave out of the scheme; neither control quantizes activations.
CONTROLS = {
    "masters": "full precision on the master weights",
    "quantized": "full precision on the dequantized weights",
}
_WEIGHTS = ("*.safetensors", "*.bin", "*.json")
#: Bytes of each file that count for the digest: so many pieces, evenly spaced.
_PIECES, _PIECE_BYTES = 64, 1 << 16


@dataclass(frozen=True)
class Policy:
    """A loaded model, and what it computes in.

    Attributes:
        source: folder or Hub id as asked for.
        adapter_on: the base of an adapter, otherwise `None`.
        scheme: the scheme that the checkpoint carries, or `None`.
        control: a key of `CONTROLS` when it is not computed under that scheme.
        n_quantized, n_skipped: linear maps in MXFP4, and those left in full precision, as they are computed here.
        sqnr_db: of the quantized weights, in decibels; `None` when there are none or their originals are gone.
        identity: what tells these weights from others.
    """

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    adapter_on: str | None
    scheme: str | None
    control: str | None
    n_quantized: int
    n_skipped: int | None
    sqnr_db: float | None
    identity: str

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def attention(self) -> str | None:
        """The implementation that the model really uses, whether or not one was asked for."""
        return getattr(self.model.config.get_text_config(), "_attn_implementation", None)

    @property
    def computed_in(self) -> str:
        """One line for people: the scheme, or what stands in its place."""
        if self.control is not None:
            return f"CONTROL: {CONTROLS[self.control]} ({self.dtype}), nothing quantized; own scheme: {self.scheme}"
        return self.scheme or f"full precision ({self.dtype}); the checkpoint carries no scheme"

    @property
    def description(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "model": self.source,
            "adapter_on": self.adapter_on,
            "scheme": self.scheme,
            "control": self.control and CONTROLS[self.control],
            "computed_in": self.computed_in,
            "dtype": self.dtype,
            "attention": self.attention,
            "n_quantized": self.n_quantized,
            "n_skipped": self.n_skipped,
            "weight_sqnr_db": self.sqnr_db,
        }


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
    if (source.startswith((".", "/")) or source.count("/") > 1) and not Path(source).is_dir():
        raise FileNotFoundError(f"cannot load the model {source!r}: there is no such folder")
    adapter_file = find_adapter_config_file(source, revision=revision)
    adapter = None if adapter_file is None else json.loads(Path(adapter_file).read_text(encoding="utf-8"))
    if adapter is None and base is not None:
        raise ValueError(f"{source} is no adapter, so it takes no base ({base})")
    weights = source if adapter is None else base or adapter.get("base_model_name_or_path")
    if not weights:
        raise ValueError(f"the adapter {source} does not name its base; give it with --base")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if adapter is None:
        options["revision"] = revision
    config = AutoConfig.from_pretrained(weights, **options)
    stored = getattr(config, "quantization_config", None)
    scheme = _scheme(stored, adapter)
    _check_control(control, scheme, stored, weights)

    if control == "masters":
        remove_scheme(config)
        options["config"] = config
    elif scheme is not None and not stored:
        options["quantization_config"] = scheme
    model = AutoModelForCausalLM.from_pretrained(
        weights, dtype=dtype, attn_implementation=attn_implementation, **options
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
    if adapter is not None:
        model = PeftModel.from_pretrained(model, source, revision=revision)
    identities = [_identity(weights, getattr(config, "_commit_hash", None))]
    if adapter_file is not None:
        # In the cache of the Hub the folder has the name of the commit.
        identities.append(_identity(source, Path(adapter_file).parent.name))
    foreign = None if scheme is not None or not stored else f"{_method(stored)} (by transformers)"
    as_own = report if control is None else None
    return Policy(
        model=model.to(device).eval(),
        tokenizer=_load_tokenizer(source, weights, revision, trust_remote_code),
        source=source,
        adapter_on=None if adapter is None else weights,
        scheme=foreign if scheme is None else scheme.describe(),
        control=control,
        n_quantized=as_own.n_quantized if as_own else 0,
        n_skipped=as_own.n_skipped if as_own else None,
        sqnr_db=as_own.sqnr_db if as_own else None,
        identity="+".join(identities),
    )


def _method(stored: Any) -> str | None:
    return stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)


def _scheme(stored: Any, adapter: dict[str, Any] | None) -> MXFP4RLConfig | None:
    """The scheme of this package that a checkpoint, or else the adapter on it, carries."""
    found = stored or (adapter or {}).get("base_quantization")
    if not found or _method(found) != QUANT_METHOD:
        return None
    return found if isinstance(found, MXFP4RLConfig) else MXFP4RLConfig.from_dict(found)


def _check_control(control: str | None, scheme: MXFP4RLConfig | None, stored: Any, weights: str) -> None:
    if control is not None and scheme is None:
        raise ValueError(
            f"{weights} carries no MXFP4 scheme, so there is nothing to dequantize: evaluate it without --dequantize"
        )
    if control == "masters" and scheme.mode == "packed" and stored:
        raise ValueError(
            f"{weights} holds packed weights alone, its master weights are gone: evaluate the checkpoint that it was "
            "packed from, or the same 4-bit weights in full precision with --dequantize quantized"
        )


def _quantized_layers(model: nn.Module) -> int:
    return sum(isinstance(module, QUANTIZED) for module in model.modules())


def _load_tokenizer(source: str, weights: str, revision: str | None, trust: bool) -> PreTrainedTokenizerBase:
    """The tokenizer saved with an adapter, or else that of its base."""
    own = Path(source)
    places = [weights] if own.is_dir() and not (own / "tokenizer_config.json").is_file() else [source, weights]
    for place in places:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                place, revision=revision if place == source else None, padding_side="left", trust_remote_code=trust
            )
        except (OSError, ValueError):
            if place == places[-1]:
                raise
            continue
        break
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _identity(name: str, commit: str | None) -> str:
    """A digest of a local folder, the commit of a Hub repository."""
    folder = Path(name)
    return folder_digest(folder) if folder.is_dir() else f"{name}@{commit}"


def folder_digest(folder: Path) -> str:
    """SHA-256 (12 digits) of a checkpoint's configuration and tokenizer and of evenly spaced pieces of its weights: it
    changes with training, costs no time, and survives a copy. The result of an evaluation that was written into the
    folder does not count."""
    digest = hashlib.sha256()
    found = {path for pattern in _WEIGHTS for path in folder.glob(pattern)}
    for path in sorted(found - {folder / RESULT_FILE}):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            if size <= _PIECES * _PIECE_BYTES:
                digest.update(file.read())
                continue
            for piece in range(_PIECES):
                file.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]
