# SPDX-License-Identifier: Apache-2.0
"""NVFP4 exports against the format's definition, torchao and compressed-tensors: exact where E4M3 scales allow it, the
least error and its count elsewhere."""

import json

import pytest
import serving
import torch
from export_files import E2M1, config_in, decode, decode_nvfp4, save_packed, save_plain
from safetensors.torch import load_file, save_file
from same_bits import tensors_in
from tiny_models import make_model
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError, export, import_checkpoint, pack_checkpoint


MANTISSAS = {"macro_block": 128, "macro_search": "block_mantissas"}
Q_PROJ = "model.layers.0.self_attn.q_proj"
ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]


def decode_ours(tensors: dict, layer: str, suffix: str = ".weight", expert: int | None = None) -> torch.Tensor:
    """The values of our own packed files, block mantissas included."""
    parts = [tensors.get(f"{layer}{suffix}{end}") for end in ("", "_scale", "_macro")]
    codes, scale, macro = (part if part is None or expert is None else part[expert] for part in parts)
    values = decode(codes, scale)
    if macro is not None:
        mantissas = torch.stack([macro >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
        values *= (1 + mantissas.double() / 4).repeat_interleave(32, dim=-1)[:, : values.shape[1]]
    return values


@pytest.mark.parametrize(
    "scheme", [{}, MANTISSAS, {"fprop": {"weight": "even+mbs128-blockwise+32x32"}}, {"scale_rule": "mse"}]
)
def test_a_packed_checkpoint_keeps_its_values(scheme, tmp_path):
    source = save_packed(tmp_path / "packed", intermediate=96, config=scheme)
    report = export(source, tmp_path / "out", "nvfp4")
    before = tensors_in(source)
    after = tensors_in(tmp_path / "out")
    layers = sorted(name.removesuffix(".weight_scale") for name in before if name.endswith(".weight_scale"))
    assert len(layers) == 14
    assert any("weight_macro" in name for name in before) == ("macro_block" in scheme or "fprop" in scheme)
    for layer in layers:
        assert torch.equal(decode_nvfp4(after, layer), decode_ours(before, layer)), layer
        assert torch.equal(after[f"{layer}.weight_packed"], before[f"{layer}.weight"])
    for module in ("self_attn", "mlp"):  # engines join q, k and v, and gate and up, under one tensor scale
        divisors = {float(after[f"{layer}.weight_global_scale"]) for layer in layers if f"layers.0.{module}" in layer}
        largest = max(float(after[f"{layer}.weight_scale"].float().max()) for layer in layers if f"0.{module}" in layer)
        assert len(divisors) == 1
        assert 256 <= largest <= 448
    assert report.blocks == (1920, 1920)
    assert report.counts() == {"kept": 14}
    assert not report.changed
    written = json.loads((tmp_path / "out/export_report.json").read_text())
    assert (written["blocks"], written["exact_blocks"]) == (1920, 1920)
    ends = ("bias", "weight_global_scale", "weight_packed", "weight_scale")
    assert {name for name in after if Q_PROJ in name} == {f"{Q_PROJ}.{end}" for end in ends}


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16"])
def test_other_libraries_read_the_trained_values_bit_for_bit(scheme, tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = save_plain(tmp_path / "base")
    policy = serving.save_policy(base, tmp_path / "policy", scheme)
    export(tmp_path / "policy", tmp_path / "out", "nvfp4")
    dequantized = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=dequantized)
    options = config_in(tmp_path / "out")["quantization_config"]
    group = quantization.QuantizationConfig.model_validate(options).config_groups["group_0"]
    stored = tensors_in(tmp_path / "out")
    layers = {name: layer for name, layer in policy.named_modules() if isinstance(layer, MXFP4Linear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        trained = layer.effective_weight(layer.weight).detach()
        assert torch.equal(loaded.get_submodule(name).weight.float(), trained), name
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        tensors = {part: stored[f"{name}.{part}"] for part in parts}
        theirs = compressors.NVFP4PackedCompressor.decompress(tensors, group)["weight"]
        assert torch.equal(theirs.float(), trained), name


@pytest.mark.parametrize(
    ("scheme", "preset", "is_quantized"),
    [("w4a8", None, False), ("w4a8", "w4a4", True), ("w4a4", None, True), ("w4a4", "w4a16", False)],
)
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4-modelopt", "quark"])
def test_inputs_are_quantized_if_they_were_to_4_bits_or_as_asked(scheme, preset, is_quantized, format, tmp_path):
    config = {name: value for name, value in serving.SCHEMES[scheme].items() if format != "quark"}
    source = save_packed(tmp_path / "packed", layers=1, config={"preset": scheme, **config})
    report = export(source, tmp_path / "out", format, preset=preset)
    options = config_in(tmp_path / "out")["quantization_config"]
    if format == "quark":
        inputs = options["global_quant_config"]["input_tensors"]
    else:
        inputs = options["config_groups"]["group_0"]["input_activations"]
    assert (inputs is not None) == is_quantized
    assert ("the exported model computes them in full precision" in " ".join(report.notes)) != is_quantized
    scales = [name for name in tensors_in(tmp_path / "out") if name.endswith(("input_scale", "input_global_scale"))]
    assert len(scales) == (7 if is_quantized and format != "quark" else 0)


def test_experts_have_one_matrix_in_each_tensor(tmp_path):
    source = save_packed(tmp_path / "packed", "qwen3_moe", config=MANTISSAS)
    report = export(source, tmp_path / "out", "nvfp4")
    ours = tensors_in(source)
    theirs = tensors_in(tmp_path / "out")
    experts = "model.layers.0.mlp.experts"
    fused = decode_ours(ours, experts, ".gate_up_proj", expert=1)
    parts = [decode_nvfp4(theirs, f"{experts}.1.{name}_proj") for name in ("gate", "up", "down")]
    assert torch.equal(torch.cat(parts[:2]), fused)
    assert torch.equal(parts[2], decode_ours(ours, experts, ".down_proj", expert=1))
    divisors = [value for name, value in theirs.items() if experts in name and name.endswith("global_scale")]
    assert len(divisors) == 12
    assert len({float(value) for value in divisors}) == 1
    assert any("ignores the tensor scales of experts" in note for note in report.notes)
    # Which is so as long as this fails for want of the tensor scale; then the note has to go.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    weight = loaded.get_parameter(f"{experts}.gate_up_proj")[1]
    assert torch.equal(weight.double(), fused * divisors[0].double())
    assert report.blocks[0] == report.blocks[1] == sum(layer.n_weights for layer in report.layers) // 32


@pytest.fixture
def wide(tmp_path):
    """A plain checkpoint, one of whose weights has scales 2**-row in its rows, a zero row, and odd values."""
    model = make_model("qwen2", dtype=torch.bfloat16)
    weight = torch.tensor([6.0, 0.5, -3.0, 1.5, 1.0, 0.0, -6.0, 2.0] * 8) * 2.0 ** -torch.arange(64).view(64, 1)
    weight[62] = 0
    model.get_submodule(Q_PROJ).weight.data.copy_(weight)
    model.save_pretrained(tmp_path / "wide")
    return tmp_path / "wide", weight.bfloat16().double()


def test_blocks_out_of_range_get_the_best_scale_of_each_half(wide, tmp_path):
    folder, weight = wide
    report = export(folder, tmp_path / "out", "nvfp4")
    tensors = tensors_in(tmp_path / "out")
    assert {float(tensors[f"{layer}.weight_global_scale"]) for layer in ATTENTION} == {256.0}
    values = decode_nvfp4(tensors, Q_PROJ)
    # E4M3 has 2**8 to 2**-9.
    assert torch.equal(values[:18], weight[:18])
    assert not torch.equal(values[18], weight[18])
    assert not values[62:].any()
    # Of all E4M3 scales and the nearest codes, none has less error.
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().view(-1, 1, 1, 1) / 256
    halves = weight[18:62].unflatten(1, (4, 16))
    grid = E2M1[:8]
    nearest = grid[((halves.abs() / scales).unsqueeze(-1) - grid).abs().argmin(dim=-1)]
    least = (nearest * scales - halves.abs()).square().sum(dim=-1).amin(dim=0)
    found = (values[18:62] - weight[18:62]).square().unflatten(1, (4, 16)).sum(dim=-1)
    assert torch.allclose(found, least, rtol=1e-12, atol=0)
    assert (least > 0).all()
    cost = next(layer for layer in report.layers if layer.name == Q_PROJ)
    assert (cost.blocks, cost.exact_blocks) == (128, 128 - 2 * 44 - 2)
    assert cost.noise > 0


def test_the_error_of_inexact_blocks_is_counted_against_what_was_packed(tmp_path, wide):
    scheme = {"preset": "w4a16", "scale_rule": "even", "macro_block": None}
    pack_checkpoint(wide[0], tmp_path / "packed", MXFP4RLConfig(mode="packed", **scheme))
    report = export(tmp_path / "packed", tmp_path / "out", "nvfp4")
    assert [layer.name for layer in report.changed] == [Q_PROJ]
    change = decode_nvfp4(tensors_in(tmp_path / "out"), Q_PROJ) - decode_ours(tensors_in(tmp_path / "packed"), Q_PROJ)
    assert report.changed[0].noise == pytest.approx(float(change.square().nansum()), rel=1e-6)


def test_plain_weights_get_block_mantissas(tmp_path):
    """They are quantized once, as a packed checkpoint with block mantissas is."""
    packed = save_packed(tmp_path / "packed", config=MANTISSAS)
    export(packed, tmp_path / "one", "nvfp4")
    report = export(tmp_path / "packed-plain", tmp_path / "two", "nvfp4")
    assert report.weights == "mxfp4+even+mbs128-blockwise"
    one = tensors_in(tmp_path / "one")
    two = tensors_in(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), two[name].view(torch.uint8)), name


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_the_config_is_what_compressed_tensors_writes(preset, tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    report = export(save_plain(tmp_path / "plain"), tmp_path / "out", "nvfp4", preset=preset)
    options = config_in(tmp_path / "out")["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(options)
    (scheme,) = config.config_groups.values()
    theirs = quantization.preset_name_to_scheme("NVFP4A16" if preset == "w4a16" else "NVFP4", ["Linear"])
    assert scheme.weights == theirs.weights
    assert scheme.input_activations == theirs.input_activations
    assert options["format"] == "nvfp4-pack-quantized"
    assert options["ignore"] == ["lm_head"]
    scales = {name: t for name, t in tensors_in(tmp_path / "out").items() if name.endswith("input_global_scale")}
    assert len(scales) == (14 if preset == "w4a4" else 0)
    assert all(torch.equal(t, torch.ones(1)) for t in scales.values())
    assert any("magnitudes above 2688" in note for note in report.notes) == (preset == "w4a4")


def test_what_nvfp4_cannot_hold_is_refused(tmp_path):
    macro = save_packed(tmp_path / "macro", config={"macro_block": 128, "macro_search": "hybrid"})
    with pytest.raises(CheckpointError, match=r"no place for macro-block factors .*even\+mbs128-blockwise"):
        export(macro, tmp_path / "out", "nvfp4")
    both = save_packed(tmp_path / "both", config={**MANTISSAS, "outlier_fallback": 1.0})
    with pytest.raises(CheckpointError, match="it has no place for the outlier-fallback residual") as refused:
        export(both, tmp_path / "out", "nvfp4")
    assert "macro-block" not in str(refused.value)
    report = export(both, tmp_path / "out", "nvfp4", "requantize")
    assert report.weights == "mxfp4+even+mbs128-blockwise"
    assert report.blocks[0] == report.blocks[1]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_export_is_imported_and_exported_again(family, tmp_path):
    source = save_packed(tmp_path / "packed", family, intermediate=96, config={"preset": "w4a4", **MANTISSAS})
    export(source, tmp_path / "out", "nvfp4")
    report = import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert report.counts() == {"kept": report.n_layers}
    assert "here they are in full precision" in report.notes[1]
    ours = tensors_in(source)
    back = tensors_in(tmp_path / "back")
    assert ours.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    assert str(loaded.config.quantization_config.weight_scheme) == "mxfp4+even+mbs128-blockwise"
    export(tmp_path / "back", tmp_path / "again", "nvfp4")
    first = tensors_in(tmp_path / "out")
    again = tensors_in(tmp_path / "again")
    assert again.keys() == {name for name in first if not name.endswith("input_global_scale")}
    assert all(torch.equal(t.view(torch.uint8), first[name].view(torch.uint8)) for name, t in again.items())


@pytest.mark.parametrize(("family", "preset"), [("qwen2", "w4a4"), ("qwen3_moe", "w4a16")])
def test_the_layout_of_model_optimizer_has_the_same_values(family, preset, tmp_path):
    """Names and fields of NVIDIA's checkpoints, such as nvidia/Llama-3.1-8B-Instruct-NVFP4: factors, not divisors."""
    source = save_packed(tmp_path / "packed", family, config={"preset": preset, **MANTISSAS})
    for format in ("nvfp4", "nvfp4-modelopt"):
        export(source, tmp_path / format, format)
    theirs, ours = (tensors_in(tmp_path / format) for format in ("nvfp4-modelopt", "nvfp4"))
    for layer in [name.removesuffix(".weight_packed") for name in ours if name.endswith("_packed")]:
        assert torch.equal(theirs.pop(f"{layer}.weight"), ours.pop(f"{layer}.weight_packed"))
        for end in ("weight", "input") if preset == "w4a4" else ("weight",):
            scale = theirs.pop(f"{layer}.{'weight_scale_2' if end == 'weight' else 'input_scale'}")
            assert scale.shape == ()
            assert float(scale) * float(ours.pop(f"{layer}.{end}_global_scale")) == 1
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name].float(), ours[name].float()) for name in ours)
    options = config_in(tmp_path / "nvfp4-modelopt")["quantization_config"]
    algorithm = {"w4a4": "NVFP4", "w4a16": "W4A16_NVFP4"}[preset]
    assert (options["quant_method"], options["quant_algo"]) == ("modelopt", algorithm)
    ignored = config_in(tmp_path / "nvfp4")["quantization_config"]["ignore"]
    assert json.loads((tmp_path / "nvfp4-modelopt/hf_quant_config.json").read_text())["quantization"] == {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ignored,
    }
    report = import_checkpoint(tmp_path / "nvfp4-modelopt", tmp_path / "back")
    assert report.blocks[0] == report.blocks[1] > 0
    before = tensors_in(source)
    back = tensors_in(tmp_path / "back")
    assert before.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("preset", ["w4a16", "w4a4"])
def test_model_optimizer_has_fused_experts_as_the_model_has_them(preset, tmp_path):
    """As its exports of gpt-oss do: ``[E, K/2, N]``, scales ``[E, K/16, N]``, and one factor (vllm#46645)."""
    source = save_packed(tmp_path / "packed", "gpt_oss", layers=1, config={"preset": preset, **MANTISSAS})
    report = export(source, tmp_path / "out", "nvfp4-modelopt")
    assert report.counts() == {"kept": 12}
    assert report.blocks[0] == report.blocks[1] > 0
    ours = tensors_in(source)
    theirs = tensors_in(tmp_path / "out")
    experts = "model.layers.0.mlp.experts"
    codes, scale, factor = (theirs[f"{experts}.down_proj{end}"] for end in ("", "_weight_scale", "_weight_scale_2"))
    assert (codes.shape, scale.shape, factor.shape) == ((4, 48, 64), (4, 6, 64), ())
    nibbles = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1, 2)
    values = E2M1[nibbles.long()] * (scale.double() * factor.double()).repeat_interleave(16, dim=1)
    for expert, value in enumerate(values):
        assert torch.equal(value.t(), decode_ours(ours, experts, ".down_proj", expert))
    assert theirs[f"{experts}.gate_up_proj"].shape == (4, 32, 192)
    assert (f"{experts}.down_proj_input_scale" in theirs) == (preset == "w4a4")
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    back = tensors_in(tmp_path / "back")
    assert ours.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())


def test_scales_that_packed_weights_cannot_hold_are_refused(tmp_path):
    """Two blocks: halves of different scales, and an eighth in the mantissa. A half without values matters not."""
    export(save_packed(tmp_path / "packed", config=MANTISSAS), tmp_path / "out", "nvfp4")
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    scale, codes = (tensors[f"{Q_PROJ}.weight_{part}"] for part in ("scale", "packed"))
    scale.view(torch.uint8)[0, 1] -= 8  # half as much
    scale.view(torch.uint8)[1, 2:] = 0x39  # 1.125
    scale[2, 0], scale[2, 2] = 0, 0
    codes[2, 16:24] = 0
    expected = decode_nvfp4(tensors, Q_PROJ)[2]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"2 of 1920 blocks .*\(1 \+ m/4\).* would cost SQNR \d+\.\d\d dB"):
        import_checkpoint(tmp_path / "out", tmp_path / "back")
    scale[:2] = 1
    save_file(tensors, file, {"format": "pt"})
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert torch.equal(decode_ours(tensors_in(tmp_path / "back"), Q_PROJ)[2], expected)
