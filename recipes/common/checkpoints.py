# SPDX-License-Identifier: Apache-2.0
"""What a folder or Hub repository holds, whole weights or an adapter, and where a scheme's options come from."""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file
from trl.chat_template_utils import gptoss_template

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import is_quantized, remove_scheme, stored_scheme
from hf_mxfp4.checkpoint.folder import check_complete, check_holds_model, read_model_config
from hf_mxfp4.checkpoint.sources import check_method


# ---- what is stored -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A model as it is stored.

    Attributes:
        source, source_revision: the folder or name on the Hub, of an adapter its own.
        weights, revision, config: of the whole weights; of an adapter, those of its base.
        adapter: the configuration of an adapter, otherwise `None`.
        adapter_folder: where it was found; in the cache of the Hub it has the name of the commit.
        quantization: how the checkpoint of the whole weights is quantized, by any method; as in `config.json`.
        scheme: that of this package which the weights or else the adapter carry.
    """

    source: str
    source_revision: str | None
    weights: str
    revision: str | None
    config: PretrainedConfig
    adapter: dict[str, Any] | None
    adapter_folder: Path | None
    quantization: dict[str, Any] | None
    scheme: MXFP4RLConfig | None


def read_stored(
    source: str, *, revision: str | None = None, base: str | None = None, trust_remote_code: bool = False
) -> Stored:
    """Read the configurations of a folder or on the Hub, and no weights; ``base`` is what an adapter belongs on instead
    of the model that it names. Raises `OSError` where there is nothing to load, `ValueError` for an adapter that names
    no base and a base for what is no adapter."""
    source_revision = revision
    if source.startswith("~"):
        source = str(Path(source).expanduser())
    if (source.startswith((".", "/")) or source.count("/") > 1) and not Path(source).is_dir():
        raise FileNotFoundError(f"cannot load the model {source!r}: there is no such folder")
    if Path(source).is_dir() and not Path(source, "adapter_config.json").is_file():
        try:
            check_holds_model(Path(source))
        except ValueError as error:
            raise FileNotFoundError(f"cannot load the model {source!r}: {error}") from None
    file = find_adapter_config_file(source, revision=revision)
    adapter = None
    adapter_folder = None
    if file is not None:
        adapter = json.loads(Path(file).read_text(encoding="utf-8"))
        adapter_folder = Path(file).parent
    if adapter is None and base is not None:
        raise ValueError(f"{source} is no adapter, so it takes no base ({base})")
    weights: str | None = source
    if adapter is not None:
        # The revision that is asked for is that of the adapter.
        if base:
            weights = base
            revision = None
        else:
            weights = adapter.get("base_model_name_or_path")
            revision = adapter.get("revision")
    if not weights:
        raise ValueError(
            f"the adapter {source} names no base; name it in adapter_config.json, or with --base of evaluate.py"
        )
    config = read_model_config(weights, revision=revision, trust_remote_code=trust_remote_code)
    quantization = getattr(config, "quantization_config", None)
    return Stored(
        source=source,
        source_revision=source_revision,
        weights=weights,
        revision=revision,
        config=config,
        adapter=adapter,
        adapter_folder=adapter_folder,
        quantization=quantization,
        scheme=stored_scheme(quantization or (adapter or {}).get("base_quantization")),
    )


def load_whole(stored: Stored, scheme: MXFP4RLConfig | str | None, **options: Any) -> PreTrainedModel:
    """Load the whole weights under a scheme, for None in full precision without the one that they carry, and for "own"
    as they are stored. ``options``: of `from_pretrained`. Raises `ValueError` when tensors are missing."""
    if scheme is None:
        options["config"] = copy.deepcopy(stored.config)
        remove_scheme(options["config"])
    elif scheme != "own" and stored.quantization is None:
        options["quantization_config"] = scheme
    elif scheme != "own":  # of a quantized checkpoint transformers takes the stored one, with what it says of loading
        check_method(stored.quantization, stored.weights)
        options["config"] = copy.deepcopy(stored.config)
        options["config"].quantization_config = {**stored.quantization, "dither_ties": scheme.dither_ties}
    options |= {"revision": stored.revision, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(stored.weights, **options)
    if not is_quantized(model):
        check_complete(info["missing_keys"], stored.weights)
    return model


#: In the names of files that tokenizers are made of.
_OF_TOKENIZERS = re.compile(r"token|vocab|tekken|\.model$")


def load_tokenizer(stored: Stored, **options: Any) -> Any:
    """Load the tokenizer saved with an adapter, or else that of its base. ``options``: of `from_pretrained`. Raises
    `FileNotFoundError` for a folder without one, where transformers may make one that knows no words."""
    source = Path(stored.source)
    options = {"padding_side": "left", **options}
    try:
        if source.is_dir() and not (source / "tokenizer_config.json").is_file():
            raise FileNotFoundError(f"{source} holds no tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(stored.source, revision=stored.source_revision, **options)
    except (OSError, ValueError):
        folder = Path(stored.weights)
        if folder.is_dir() and not any(_OF_TOKENIZERS.search(file.name) for file in folder.iterdir()):
            raise FileNotFoundError(
                f"{folder} holds no tokenizer; save it there with tokenizer.save_pretrained"
            ) from None
        tokenizer = AutoTokenizer.from_pretrained(stored.weights, revision=stored.revision, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if "<|channel|>final<|message|>" in (tokenizer.chat_template or ""):  # gpt-oss: answers are in this channel
        tokenizer.response_template = tokenizer.response_template or gptoss_template
    return tokenizer


# ---- schemes --------------------------------------------------------------------------------------------------------


_OPTIONS = [option.name for option in fields(MXFP4RLConfig) if option.init]
#: Without those that say how weights are loaded.
_OF_SCHEMES = [option.name for option in fields(MXFP4RLConfig) if option.init and option.compare]
#: Options that belong to the model or the machine, whatever the scheme.
_OF_THE_MODEL = ("format_version", "modules_to_not_convert", "backend")
#: Options that a preset leaves alone: they do not change the numbers that it stands for.
_BESIDE_PRESETS = (*_OF_THE_MODEL, "mode", "matmul_backend", "stochastic_seed", "dither_ties", "smooth")


def reset_scheme(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prepare options for others to be put over them; return what is left of ``earlier``, and what was dropped.

    A preset in ``later`` resets the options of the scheme in ``earlier``, so that it is exactly the preset, and so does
    another mode.
    """
    if "mode" in later and later["mode"] != earlier.get("mode", "qat"):
        kept = _OF_THE_MODEL
    elif "preset" in later:
        kept = _BESIDE_PRESETS
    else:
        return dict(earlier), {}
    left = {}
    dropped = {}
    for name, value in earlier.items():
        if name in _OPTIONS and name not in kept and name not in later:
            dropped[name] = value
        else:
            left[name] = value
    return left, dropped


def differences(config: MXFP4RLConfig, other: MXFP4RLConfig) -> list[str]:
    """List the options in which two schemes differ, each as ``name=value (not other value)``."""
    return [
        f"{name}={getattr(config, name)} (not {getattr(other, name)})"
        for name in _OF_SCHEMES
        if getattr(config, name) != getattr(other, name)
    ]
