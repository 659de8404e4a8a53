# SPDX-License-Identifier: Apache-2.0
"""The table of docs/vllm.md: what each export of each policy holds, read by the definition of its format."""

from pathlib import Path

import pytest
import serving
import torch
from export_files import config_in, decode, decode_nvfp4, save_plain
from same_bits import logits, tensors_in
from transformers import AutoModelForCausalLM

from hf_mxfp4.checkpoint import CheckpointError, export, pack_checkpoint


LAYER = "model.layers.0.mlp.down_proj"
ROOT = Path(__file__).resolve().parents[2]


def read_gguf(folder: Path) -> torch.Tensor:
    gguf = pytest.importorskip("gguf")
    (file,) = folder.glob("*.gguf")
    (found,) = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.ffn_down.weight"]
    return torch.from_numpy(gguf.dequantize(found.data, found.tensor_type))


def read_mxfp4(folder: Path) -> torch.Tensor:
    tensors = tensors_in(folder)
    codes = tensors.get(f"{LAYER}.weight_packed", tensors.get(f"{LAYER}.weight"))
    return decode(codes, tensors[f"{LAYER}.weight_scale"])


READERS = {
    "nvfp4": lambda folder: decode_nvfp4(tensors_in(folder), LAYER),
    "quark": read_mxfp4,
    "compressed-tensors": read_mxfp4,
    "gguf": read_gguf,
    "bf16": lambda folder: tensors_in(folder)[f"{LAYER}.weight"],
}


def inputs_in(folder: Path) -> str | None:
    """What a checkpoint says that inputs are quantized to, or what llama.cpp does."""
    if list(folder.glob("*.gguf")):
        return "8-bit"
    options = config_in(folder).get("quantization_config", {})
    if "global_quant_config" in options:
        return options["global_quant_config"]["input_tensors"] and "MXFP4"
    groups = options.get("config_groups", {"group_0": {"input_activations": None}})
    return groups["group_0"]["input_activations"] and "NVFP4"


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Trained policies of one layer and their folders, by the names of their schemes."""
    root = tmp_path_factory.mktemp("policies")
    base = save_plain(root / "base", layers=1, intermediate=128)
    return {scheme: (serving.save_policy(base, root / scheme, scheme), root / scheme) for scheme in serving.SCHEMES}


@pytest.mark.parametrize("format", serving.EXPORTS)
@pytest.mark.parametrize("scheme", serving.SCHEMES)
def test_an_export_holds_what_the_table_says(policies, scheme, format, tmp_path):
    policy, folder = policies[scheme]
    expected = serving.cell(scheme, format)
    if expected == serving.REFUSED:
        with pytest.raises(CheckpointError):
            export(folder, tmp_path / "out", format, **serving.EXPORTS[format])
        return
    export(folder, tmp_path / "out", format, **serving.EXPORTS[format])
    layer = policy.get_submodule(LAYER)
    trained = layer.effective_weight(layer.weight).detach()
    found = READERS[format](tmp_path / "out")
    weights = serving.OTHER
    if torch.equal(found.double(), trained.double()):
        weights = serving.SAME
    elif torch.equal(found, trained.to(torch.bfloat16)):
        weights = serving.ROUNDED
    inputs = inputs_in(tmp_path / "out")
    if weights == serving.SAME and inputs is None and layer.config.activation_scheme is None:
        assert expected == serving.AS_TRAINED
    else:
        assert expected == (weights if inputs is None else f"{weights}, {inputs} inputs")


@pytest.mark.parametrize("scheme", serving.SCHEMES)
def test_transformers_computes_as_trained(policies, scheme, tmp_path):
    """From packed files, or from the policy's own where these weights cannot be packed."""
    policy, folder = policies[scheme]
    if policy.config.quantization_config.packing_unsupported_reason:
        with pytest.raises(CheckpointError, match="packed ones are in MXFP4"):
            pack_checkpoint(folder, tmp_path / "out")
    else:
        pack_checkpoint(folder, tmp_path / "out", dtype="float32")
        folder = tmp_path / "out"
    assert serving.cell(scheme, "transformers") == serving.AS_TRAINED
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Where sums have another order, an input at the edge of two values of a grid may get the other one.
    found = logits(served)
    expected = logits(policy)
    assert (found - expected).norm() / expected.norm() < (1e-4 if scheme == "w4a16" else 0.01)


def test_the_docs_show_this_table():
    assert serving.as_markdown() in (ROOT / "docs" / "vllm.md").read_text()
