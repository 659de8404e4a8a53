# SPDX-License-Identifier: Apache-2.0
"""Classes of plain layers that quantized ones stand for: Falcon's linear layers, Llama 4's experts, and new classes."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM, Qwen2ForCausalLM
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

import hf_mxfp4
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError
from hf_mxfp4.checkpoint.names import FileNames, layer_shapes
from hf_mxfp4.layers import MXFP4Experts, MXFP4PackedExperts, full_precision
from hf_mxfp4.model import plain_layers
from hf_mxfp4.model.layer_names import find_layers
from hf_mxfp4.model.plain_layers import ExpertsAdapter, LinearAdapter, register_experts, register_linear


IDS = torch.arange(2, 18).view(2, 8)
LLAMA4 = {
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 32,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    torch.manual_seed(0)
    falcon = FalconConfig(vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, bias=True)
    models = {"falcon": FalconForCausalLM(falcon), "llama4_text": make_model("llama4_text", **LLAMA4)}
    folders = {}
    for family, model in models.items():
        folders[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(folders[family])
    return folders


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize(
    ("family", "layer", "classes"),
    [
        ("falcon", "transformer.h.0.mlp.dense_h_to_4h", (MXFP4Linear, MXFP4PackedLinear)),
        ("llama4_text", "model.layers.0.feed_forward.experts", (MXFP4Experts, MXFP4PackedExperts)),
    ],
)
def test_a_model_computes_as_the_plain_one_with_quantized_weights(family, layer, classes, mode, checkpoints):
    scheme = MXFP4RLConfig(mode=mode, preset="w4a16", dither_ties=mode != "packed")
    model = load(checkpoints[family], quantization_config=scheme)
    assert isinstance(model.get_submodule(layer), classes)
    quantized = logits(model)
    assert not torch.allclose(quantized, logits(load(checkpoints[family])), rtol=1e-3)
    plain = model.dequantize()
    assert type(plain.get_submodule(layer)) in (FalconLinear, Llama4TextExperts)
    torch.testing.assert_close(quantized, logits(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["falcon", "llama4_text"])
def test_full_precision_runs_the_plain_code(family, checkpoints):
    model = load(checkpoints[family], quantization_config=MXFP4RLConfig(smooth=False, dither_ties=False))
    with full_precision(model):
        assert torch.equal(logits(model), logits(load(checkpoints[family])))


@pytest.mark.parametrize("family", ["falcon", "llama4_text"])
def test_a_packed_model_saves_and_loads(family, checkpoints, tmp_path):
    model = load(checkpoints[family], quantization_config=MXFP4RLConfig())
    packed = hf_mxfp4.pack(model)
    packed.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(packed))


@pytest.mark.parametrize("family", ["falcon", "llama4_text"])
def test_gradients_reach_every_quantized_weight(family, checkpoints):
    model = load(checkpoints[family], quantization_config=MXFP4RLConfig())
    model(input_ids=IDS, labels=IDS).loss.backward()
    layers = find_layers(load(checkpoints[family]))[0]
    for name in layers:
        for parameter in model.get_submodule(name).parameters():
            assert parameter.grad.abs().sum() > 0


# ---- new classes ----------------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class KernelLinear(nn.Module):
    """A linear layer that stores its weight transposed, under a name of its own."""

    def __init__(self, in_features, out_features, has_bias, device=None):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(in_features, out_features, device=device) / 8)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device)) if has_bias else None

    def forward(self, x):
        product = x @ self.kernel
        return product if self.bias is None else product + self.bias


class KernelAdapter(LinearAdapter):
    weight_name = "kernel"
    is_transposed = True

    def size(self, layer):
        columns, rows = layer.kernel.shape
        return rows, columns


class KernelQwen2(Qwen2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.up_proj = KernelLinear(config.hidden_size, config.intermediate_size, True)
            layer.mlp.down_proj = KernelLinear(config.intermediate_size, config.hidden_size, False)
        self.post_init()


@pytest.fixture
def registry(monkeypatch):
    """Take back what a test registers."""
    monkeypatch.setattr(plain_layers, "_LINEARS", dict(plain_layers._LINEARS))
    monkeypatch.setattr(plain_layers, "_EXPERTS", dict(plain_layers._EXPERTS))


def test_layers_of_a_registered_class_are_quantized(registry):
    model = nn.Sequential(Scaled(64, 32), nn.Linear(32, 32))
    assert list(find_layers(model)[0]) == ["1"]
    register_linear(f"{__name__}.Scaled", LinearAdapter())
    assert list(find_layers(model)[0]) == ["0", "1"]
    layer = MXFP4Linear.from_linear(model[0], MXFP4RLConfig())
    assert type(layer.to_linear()) is Scaled


@pytest.fixture
def kernel_checkpoint(registry, tmp_path):
    register_linear(f"{__name__}.KernelLinear", KernelAdapter())
    torch.manual_seed(0)
    model = KernelQwen2(make_model().config)
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight[3] = 64  # which smoothing moves into up_proj
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load_kernels(folder, **options):
    return KernelQwen2.from_pretrained(folder, dtype=torch.float32, **options).eval()


def test_a_smoothed_model_computes_on_converted_weights(kernel_checkpoint):
    model = load_kernels(kernel_checkpoint, quantization_config=MXFP4RLConfig())
    assert model.quantization_report.smoothing.n_channels > 0
    with full_precision(model):
        smoothed = logits(model)
    torch.testing.assert_close(smoothed, logits(load_kernels(kernel_checkpoint)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(model), smoothed, rtol=1e-3)


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_converted_weights_are_saved_and_loaded(mode, kernel_checkpoint, tmp_path):
    model = load_kernels(kernel_checkpoint, quantization_config=MXFP4RLConfig(mode=mode))
    model.save_pretrained(tmp_path / "quantized")
    assert torch.equal(logits(load_kernels(tmp_path / "quantized")), logits(model))


def test_converted_weights_are_trained_under_their_plain_names_in_files(kernel_checkpoint, tmp_path):
    model = load_kernels(kernel_checkpoint, quantization_config=MXFP4RLConfig())
    model.save_pretrained(tmp_path / "quantized")
    stored = load_file(tmp_path / "quantized" / "model.safetensors")
    layer = model.model.layers[0].mlp.up_proj
    assert torch.equal(stored["model.layers.0.mlp.up_proj.kernel"], layer.weight.T)


def test_converted_weights_are_packed_and_loaded(kernel_checkpoint, tmp_path):
    model = load_kernels(kernel_checkpoint, quantization_config=MXFP4RLConfig())
    packed = hf_mxfp4.pack(model)
    packed.save_pretrained(tmp_path / "packed")
    loaded = load_kernels(tmp_path / "packed")
    assert type(loaded.model.layers[0].mlp.down_proj) is MXFP4PackedLinear
    assert torch.equal(logits(loaded), logits(packed))


def test_a_plain_model_of_converted_weights_saves_as_before(kernel_checkpoint, tmp_path):
    model = load_kernels(kernel_checkpoint, quantization_config=MXFP4RLConfig(preset="w4a16"))
    quantized = logits(model)
    model.dequantize().save_pretrained(tmp_path / "plain_again")
    plain = load_kernels(tmp_path / "plain_again")
    assert type(plain.model.layers[0].mlp.up_proj) is KernelLinear
    torch.testing.assert_close(logits(plain), quantized, rtol=1e-4, atol=1e-4)


def test_layers_of_a_converted_class_can_stay_plain(kernel_checkpoint):
    scheme = MXFP4RLConfig(modules_to_not_convert=["up_proj"])
    model = load_kernels(kernel_checkpoint, quantization_config=scheme)
    assert type(model.model.layers[0].mlp.up_proj) is KernelLinear
    assert model.quantization_report.smoothing.n_channels > 0
    with full_precision(model):
        smoothed = logits(model)
    torch.testing.assert_close(smoothed, logits(load_kernels(kernel_checkpoint)), rtol=1e-4, atol=1e-4)


def test_files_of_converted_weights_are_not_packed_one_by_one(kernel_checkpoint):
    model = load_kernels(kernel_checkpoint)
    layers = {"up_proj": model.model.layers[0].mlp.up_proj}
    with pytest.raises(CheckpointError, match="pack"):
        layer_shapes(layers, FileNames(model))


def test_a_class_is_registered_once(registry):
    with pytest.raises(ValueError, match="Linear is registered already"):
        register_linear("torch.nn.modules.linear.Linear", LinearAdapter())


@pytest.mark.parametrize(
    ("register", "base", "missing"),
    [(register_linear, LinearAdapter, "make_empty"), (register_experts, ExpertsAdapter, "routing")],
)
def test_an_adapter_without_a_method_is_refused(registry, register, base, missing):
    class Incomplete(base):
        pass

    setattr(Incomplete, missing, None)
    with pytest.raises(TypeError, match=f"lacks {missing}"):
        register("package.Layer", Incomplete())
