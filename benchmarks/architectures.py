# SPDX-License-Identifier: Apache-2.0
"""Try tiny models of transformers' architectures in both modes, and compare each with its dequantized twin.

    python -m benchmarks.architectures                  # all; what the record has already is kept
    python -m benchmarks.architectures llama t5 --again

Writes `benchmarks/results/architectures.json`, from which `python -m benchmarks.write_docs` makes the table of
docs/models.md. In each mode, under w4a16: load, logits (in training and evaluation) against those of the twin, which is
the same model with the quantized weights in plain layers, `generate`, save, load again (equal logits), and one training
step: of the weights in mode "qat", of LoRA adapters in mode "packed".
"""

import contextlib
import inspect
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import QUANTIZED

from .records import made, option_parser, recorded, write
from .tiny_architectures import VOCABULARY, architectures, tiny_model


PACKAGES = ("torch", "transformers", "peft")
#: Largest relative difference between a model and its twin: what sums in another order may differ by.
TOLERANCE = 1e-5
#: Largest one between a model and itself, loaded again: where memory begins changes the order of sums.
SAME = 1e-6
#: Elements of a model that is still tried.
LARGEST = 20_000_000
MODES = ("qat", "packed")
#: How errors begin with which loading refuses an architecture.
REFUSALS = ("MXFP4RLConfig matches no layer", "keeps experts in fused 3-D weights")


class NotTried(Exception):
    """A tiny model of an architecture cannot be made or run in full precision."""


class Wrong(Exception):
    """A step of a quantized model failed."""


def try_architecture(model_type: str) -> dict[str, str]:
    """Return what became of an architecture: ``outcome`` "right", "refused", "wrong" or "not tried", and ``detail``."""
    _, cls = architectures()[model_type]
    try:
        with tempfile.TemporaryDirectory() as folder:
            inputs = _save_plain(model_type, cls, Path(folder))
            counts = {_try_mode(getattr(transformers, cls), Path(folder), mode, inputs) for mode in MODES}
        return {"outcome": "right", "detail": f"{counts.pop()} layers"}
    except NotTried as error:
        return {"outcome": "not tried", "detail": _line(error)}
    except Wrong as error:
        outcome = "wrong"
        if any(text in str(error) for text in REFUSALS):
            outcome = "refused"
        return {"outcome": outcome, "detail": _line(error)}


def _save_plain(model_type: str, cls: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a tiny plain model, and return inputs that it computes finite logits of."""
    with _wrapped(NotTried, "no tiny model"):
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in tiny_model(model_type, cls).parameters())
        if size > LARGEST:
            raise ValueError(f"{size / 1e6:.0f} M parameters")
        torch.manual_seed(0)
        model = tiny_model(model_type, cls).eval()
    with _wrapped(NotTried, "full precision"):
        inputs = _inputs(model)
        if not _logits(model, inputs).isfinite().all():
            raise ValueError("logits are not finite")
        model.save_pretrained(folder / "plain")
        again = type(model).from_pretrained(folder / "plain", dtype=torch.float32).eval()
        _compare(_logits(again, inputs), _logits(model, inputs), SAME, "of the saved model")
        _generate(again, inputs)
    return inputs


def _try_mode(cls: type, folder: Path, mode: str, inputs: dict[str, torch.Tensor]) -> int:
    scheme = MXFP4RLConfig(mode=mode, preset="w4a16")
    with _wrapped(Wrong, f"{mode}: load"):
        model = cls.from_pretrained(folder / "plain", dtype=torch.float32, quantization_config=scheme).eval()
    with _wrapped(Wrong, f"{mode}: twin"):
        twin = cls.from_pretrained(folder / "plain", dtype=torch.float32, quantization_config=scheme).eval()
        twin.dequantize()
        for training in (False, True):
            _compare(_logits(model.train(training), inputs), _logits(twin.train(training), inputs))
        expected = _logits(model.eval(), inputs)
        del twin
    with _wrapped(Wrong, f"{mode}: generate"):
        _generate(model, inputs)
    with _wrapped(Wrong, f"{mode}: save"):
        model.save_pretrained(folder / mode)
    with _wrapped(Wrong, f"{mode}: load again"):
        again = cls.from_pretrained(folder / mode, dtype=torch.float32).eval()
        _compare(_logits(again, inputs), expected, SAME, "of the saved model")
        if again.quantization_report.quantized != model.quantization_report.quantized:
            raise ValueError("other layers are quantized after saving and loading")
    with _wrapped(Wrong, f"{mode}: training step"):
        if mode == "packed":
            _train_adapters(model, inputs)
        else:
            _train(model, inputs)
    return len(again.quantization_report.quantized)


def _train(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    weights = [weight for module in model.modules() if isinstance(module, QUANTIZED) for weight in module.parameters()]
    _step(model.train(), inputs)
    if all(weight.grad is None or not weight.grad.any() for weight in weights):
        raise ValueError("no quantized layer got a gradient")
    torch.optim.SGD(model.parameters(), 1e-3).step()
    if not _logits(model.eval(), inputs).isfinite().all():
        raise ValueError("logits are not finite after a step")


def _train_adapters(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    from peft import LoraConfig, get_peft_model

    names = [name for name, module in model.named_modules() if isinstance(module, QUANTIZED)]
    linears = [name for name in names if isinstance(model.get_submodule(name), nn.Linear)]
    if not linears:
        return  # adapters of experts are tried in tests/layers
    if model.config.model_type == "reformer":  # reversible layers compute gradients of nothing else
        model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=linears))
    _step(model.train(), inputs)
    factors = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    if all(factor.grad is None or not factor.grad.any() for factor in factors):
        raise ValueError("no adapter got a gradient")


def _step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    output = model(**inputs, **_options(model))
    loss = output.logits.float().square().mean()
    if not loss.isfinite():
        raise ValueError("the loss is not finite")
    loss.backward()


def _generate(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    if model.can_generate() and "input_ids" in inputs:
        start = {}
        if model.config.is_encoder_decoder:
            start["decoder_start_token_id"] = 1
        model.generate(**inputs, **start, max_new_tokens=3, min_new_tokens=3, do_sample=False)


def _compare(
    found: torch.Tensor, expected: torch.Tensor, limit: float = TOLERANCE, of: str = "of the dequantized model"
) -> None:
    difference = ((found - expected).norm() / expected.norm()).item()
    if not difference <= limit:
        raise ValueError(f"logits differ from those {of} by {difference:.1e}")


@torch.no_grad()
def _logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    output = model(**inputs, **_options(model))
    return output.logits.float()


def _options(model: nn.Module) -> dict[str, Any]:
    """Return options of the forward pass: training keeps no cache."""
    if not hasattr(model.config.get_text_config(decoder=True), "use_cache"):
        return {}
    return {"use_cache": False}


def _inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return random inputs of a model: text where it reads text, else by what it says is its main one."""
    ids = torch.randint(4, VOCABULARY - 8, (2, 8), generator=torch.Generator().manual_seed(1))
    config = model.config
    name = model.main_input_name
    if not config.is_encoder_decoder and "input_ids" in inspect.signature(model.forward).parameters:
        name = "input_ids"
    inputs = {}
    if name in ("input_features", "input_values"):
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16)
        length = 2 * getattr(config, "max_source_positions", 100)
        shape = {"input_values": (2, 4000), "input_features": (2, bins, length)}[name]
        if name == "input_features" and config.model_type == "speech_to_text":
            shape = (2, 40, bins)
        inputs[name] = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    elif name == "pixel_values":
        side = getattr(getattr(config, "encoder", config), "image_size", 224)
        inputs[name] = torch.randn((2, 3, side, side), generator=torch.Generator().manual_seed(2))
    else:
        inputs["input_ids"] = ids
    if config.is_encoder_decoder or name != "input_ids":
        inputs["decoder_input_ids"] = ids[:, :5]
    return inputs


@contextlib.contextmanager
def _wrapped(kind: type[Exception], step: str):
    try:
        yield
    except (NotTried, Wrong):
        raise
    except Exception as error:
        raise kind(f"{step}: {type(error).__name__}: {error}") from error


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if len(text) > 200:
        text = f"{text[:197]}..."
    return text


def main() -> None:
    parser = option_parser(__doc__, "architectures")
    parser.add_argument("architectures", nargs="*", help="model types; all by default")
    parser.add_argument("--again", action="store_true", help="try again what the record has")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("hf_mxfp4").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = architectures()
    found = {record["name"]: record for record in recorded(options.out)}
    for name in options.architectures or known:
        if name in found and not options.again:
            continue
        start = time.perf_counter()
        kind, cls = known[name]
        record = {"name": name, "kind_of_model": kind, "class": cls, **try_architecture(name)}
        layers = 0
        if record["outcome"] == "right":
            layers = int(record["detail"].split()[0])
        record |= {"shape": [2, 8], "value": layers, "unit": "quantized layers"}
        record |= dict.fromkeys(("baseline", "ratio", "ceiling_fraction"))
        found[name] = record | made("python -m benchmarks.architectures", PACKAGES, machine="any CPU")
        print(f"{name}: {record['outcome']}: {record['detail']} ({time.perf_counter() - start:.1f} s)", flush=True)
        write([found[name] for name in known if name in found], options.out)


if __name__ == "__main__":
    main()
