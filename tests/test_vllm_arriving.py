# SPDX-License-Identifier: Apache-2.0
"""What is known of vLLM's layers, how their weights are converted on their way, and adapters beside them: the parts of
the plugin that need no vLLM."""

import pytest
import torch
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.backends.select import dequantize
from hf_mxfp4.gemm import packed_shapes, packed_tensor, quantize_weight
from hf_mxfp4.integrations.vllm.adapters import add_adapters, make_room
from hf_mxfp4.integrations.vllm.arriving_linears import ArrivingLinears
from hf_mxfp4.integrations.vllm.expected import ExpectedLayers
from hf_mxfp4.integrations.vllm.served import WeightBytes, served_bytes
from hf_mxfp4.integrations.vllm.settings import EngineSettings


NAME = "model.layers.0.mlp.down_proj"
CONFIGS = [MXFP4RLConfig(mode="packed"), MXFP4RLConfig(outlier_fallback_rate=0.1), MXFP4RLConfig(weight_block="32x32")]
IDS = ["packed", "selective fallback", "tiles"]


# ---- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_read_and_written():
    assert EngineSettings.read(None, {}) == EngineSettings("packed", 0)
    settings = EngineSettings.read({"adapter_rank": 16}, {})
    assert EngineSettings.read(settings.to_dict(), {}) == settings == EngineSettings("packed", 16)


def test_the_environment_goes_first():
    variables = {"MXFP4_RL_VLLM_WEIGHTS": "packed", "MXFP4_RL_VLLM_ADAPTER_RANK": "4"}
    assert EngineSettings.read({"weights": "dense"}, variables) == EngineSettings("packed", 4)


@pytest.mark.parametrize(
    "options, variables, reason",
    [
        ({"weights": "sparse"}, {}, r"vllm\.weights='sparse' must be 'packed', 'dense' or 'native'"),
        ({"weight": "dense"}, {}, "has no option 'weight'; did you mean 'weights'"),
        ({"adapter_rank": -1}, {}, r"adapter_rank=-1 must be a whole number"),
        ({"adapter_rank": True}, {}, r"adapter_rank=True must be a whole number"),
        ({"adapter_rank": 4, "weights": "dense"}, {}, r"needs vllm\.weights='packed'"),
        ({"adapter_rank": 4, "weights": "native"}, {}, r"needs vllm\.weights='packed'"),
        ("dense", {}, "must be a mapping"),
        ({}, {"MXFP4_RL_VLLM_ADAPTER_RANK": "four"}, "MXFP4_RL_VLLM_ADAPTER_RANK='four' must be a whole number"),
    ],
)
def test_unknown_settings_are_refused(options, variables, reason):
    with pytest.raises(ValueError, match=reason):
        EngineSettings.read(options, variables)


def test_policies_pass_over_what_is_said_to_vllm():
    config = MXFP4RLConfig(preset="w4a16")
    assert MXFP4RLConfig.from_dict({**config.to_dict(), "vllm": {"weights": "dense"}}) == config


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_layer_is_known_by_its_name_and_by_what_models_make_of_it():
    expected = ExpectedLayers(linears={"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"})
    assert expected.linear("model.layers.1.mlp.up_proj") == "model.layers.1.mlp.up_proj"
    assert expected.linear("layers.1.mlp.up_proj") == "model.layers.1.mlp.up_proj"
    assert expected.linear("language_model.model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert expected.linear("mlp.up_proj") is None  # of either
    assert expected.linear("model.layers.2.mlp.up_proj") is None
    assert expected.linear("model.layers.11.mlp.up_proj") is None
    expected.linears.add("model.layers.2.mlp.up_proj")
    assert expected.linear("layers.2.mlp.up_proj") == "model.layers.2.mlp.up_proj"


# ---- weights on their way --------------------------------------------------------------------------------------------


def expected_layers(**options):
    return ExpectedLayers(EngineSettings(**options), linears={NAME}, dtype=torch.float32)


def master(seed=0):
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))


def values(packed, scheme):
    return dequantize(packed_tensor(packed, 256, scheme, torch.float32), torch.float32)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_masters_are_quantized_whole_for_packed_layers_and_once(config):
    expected, weight = expected_layers(), master()
    converter = ArrivingLinears(config, expected)
    found = dict(converter.convert(f"{NAME}.weight", weight))
    wanted = quantize_weight(weight, config.weight_scheme)
    assert list(found) == [f"{NAME}.{part}" for part in wanted]
    assert all(torch.equal(found[f"{NAME}.{part}"], wanted[part]) for part in wanted)
    assert expected.n_quantized == 1 and expected.arrived == {NAME}
    # The model hands them on to its parts.
    assert [converter.convert(name.removeprefix("model."), tensor) for name, tensor in found.items()] == [None] * len(
        wanted
    )
    assert expected.n_quantized == 1


def test_codes_go_into_packed_layers_as_they_are():
    config, expected = CONFIGS[0], expected_layers()
    packed = quantize_weight(master(), config.weight_scheme)
    assert [ArrivingLinears(config, expected).convert(f"{NAME}.{part}", t) for part, t in packed.items()] == [None] * 3
    assert expected.arrived == {NAME} and expected.n_quantized == 0


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_codes_are_dequantized_for_dense_layers_once_all_are_there(config, is_loaded):
    """Each in a stream of its own, as trainers push; in any order; and again."""
    expected = expected_layers(weights="dense")
    expected.is_loaded = is_loaded
    for seed in (0, 1):
        packed = quantize_weight(master(seed), config.weight_scheme)
        *first, last = reversed(packed.items())
        for part, tensor in first:
            assert ArrivingLinears(config, expected).convert(f"{NAME}.{part}", tensor) == []
        ((name, found),) = ArrivingLinears(config, expected).convert(f"{NAME}.{last[0]}", last[1])
        assert name == f"{NAME}.weight" and torch.equal(found, values(packed, config.weight_scheme))
        assert expected.arrived == {NAME} and not expected.pending
        assert ArrivingLinears(config, expected).convert("layers.0.mlp.down_proj.weight", found) is None


def test_masters_are_quantized_for_dense_layers_until_they_are_pushed():
    config, expected, weight = CONFIGS[1], expected_layers(weights="dense"), master()
    ((name, found),) = ArrivingLinears(config, expected).convert(f"{NAME}.weight", weight)
    assert name == f"{NAME}.weight" and expected.n_quantized == 1
    assert torch.equal(found, values(quantize_weight(weight, config.weight_scheme), config.weight_scheme))
    assert not torch.equal(found, weight)
    expected.is_loaded = True
    assert ArrivingLinears(config, expected).convert(f"{NAME}.weight", weight) is None
    assert expected.n_quantized == 1


def test_codes_of_other_shapes_are_refused():
    config, expected = CONFIGS[0], expected_layers(weights="dense")
    packed = quantize_weight(master(), config.weight_scheme)
    packed["weight_macro"] = packed["weight_macro"][:, :1]
    with pytest.raises(ValueError, match=rf"{NAME}\.weight_macro is torch\.uint8 \[64, 1\]; expected uint8 \[64, 2\]"):
        for part, tensor in packed.items():
            ArrivingLinears(config, expected).convert(f"{NAME}.{part}", tensor)


def test_what_is_no_weight_of_a_quantized_layer_is_left_alone():
    convert = ArrivingLinears(CONFIGS[0], expected_layers()).convert
    assert convert("lm_head.weight", master()) is None
    assert convert("model.norm.weight", torch.ones(4)) is None
    assert convert(f"{NAME}.bias", torch.ones(64)) is None


def test_adapters_need_room():
    name = f"{NAME}.lora_A.weight"
    with pytest.raises(ValueError, match=rf"{name} was pushed, and vLLM has no room for adapters; set adapter_rank"):
        ArrivingLinears(CONFIGS[0], expected_layers()).convert(name, torch.zeros(4, 256))
    assert ArrivingLinears(CONFIGS[0], expected_layers(adapter_rank=4)).convert(name, torch.zeros(4, 256)) is None


def test_it_is_logged_once_that_pushed_weights_are_quantized(caplog):
    expected = expected_layers()
    expected.is_loaded = True
    with caplog.at_level("INFO", logger="hf_mxfp4"):
        for _ in range(2):
            ArrivingLinears(CONFIGS[0], expected).convert(f"{NAME}.weight", master())
    assert caplog.text.count("pushed to vLLM in full precision") == 1 and expected.n_quantized == 2


def test_bytes_are_logged_after_the_last_layer(caplog):
    expected = expected_layers(adapter_rank=4)
    expected.n_layers = 2
    scheme = CONFIGS[0].weight_scheme
    tensors = list(quantize_weight(master(), scheme).values())
    with caplog.at_level("INFO", logger="hf_mxfp4"):
        expected.is_done(WeightBytes.of(tensors, 64, 256, scheme))
        assert not caplog.text
        for _ in range(2):  # loaded again
            expected.is_done(WeightBytes.of(tensors, 64, 256, scheme))
    assert caplog.text.count("keeps 2 quantized layers packed in 0.0 MiB (4.31 bits a weight)") == 1
    assert "room for adapters up to rank 4" in caplog.text


# ---- adapters --------------------------------------------------------------------------------------------------------


class Joined(nn.Module):
    """A layer of vLLM: parts below each other, of which this process has a share of the rows or of the columns."""

    def __init__(self, rows, columns, rank, n_parts, *, tp_rank=0):
        super().__init__()
        self.rows, self.tp_rank = rows, tp_rank
        make_room(self, "layer", rank, n_parts, (sum(rows), columns), torch.float32, self.weight_loader)

    def weight_loader(self, param, loaded_weight, loaded_shard_id=None):
        data = param.data
        if loaded_shard_id is not None:
            index = "qkv".index(loaded_shard_id)
            data = data.narrow(param.output_dim, sum(self.rows[:index]), self.rows[index])
        assert data.shape == loaded_weight.shape
        data.copy_(loaded_weight)


def load(layer, a, b, *shard):
    layer.lora_A.weight.weight_loader(layer.lora_A.weight, a, *shard)
    layer.lora_B.weight.weight_loader(layer.lora_B.weight, b, *shard)


def test_adapters_of_joined_layers_have_ranks_of_their_own():
    layer, x, y = Joined([32, 8, 8], 64, 4, 3), torch.randn(5, 64), torch.randn(5, 48)
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    assert torch.equal(add_adapters(y, x, layer, layer.rows), y)
    q, v = (torch.randn(4, 64), torch.randn(32, 4)), (torch.randn(2, 64), torch.randn(8, 2))
    load(layer, *q, "q")
    load(layer, *v, "v")
    added = torch.cat([x @ q[0].T @ q[1].T, torch.zeros(5, 8), x @ v[0].T @ v[1].T], dim=1)
    assert torch.allclose(add_adapters(y, x, layer, layer.rows), y + added, atol=1e-5)
    smaller = torch.randn(1, 64), torch.randn(32, 1)
    load(layer, *smaller, "q")
    added[:, :32] = x @ smaller[0].T @ smaller[1].T
    assert torch.allclose(add_adapters(y, x, layer, layer.rows), y + added, atol=1e-5)
    assert [parameter.data_ptr() for parameter in layer.parameters()] == addresses


def test_processes_split_the_columns_of_an_adapter():
    a, b, x = torch.randn(2, 64), torch.randn(8, 2), torch.randn(5, 64)
    y = torch.zeros(5, 8)
    for tp_rank in range(2):
        layer = Joined([8], 32, 2, 1, tp_rank=tp_rank)
        load(layer, a, b)
        y = add_adapters(y, x[:, 32 * tp_rank : 32 * (tp_rank + 1)], layer, layer.rows)
    assert torch.allclose(y, x @ a.T @ b.T, atol=1e-5)


def test_what_has_no_room_is_refused():
    layer = Joined([32, 8, 8], 64, 4, 3)
    with pytest.raises(ValueError, match="layer: an adapter of rank 5 was pushed, and there is room for rank 4"):
        load(layer, torch.zeros(5, 64), torch.zeros(32, 5), "q")
    with pytest.raises(ValueError, match="layer: an adapter of rank 5 was pushed"):
        layer.lora_B.weight.weight_loader(layer.lora_B.weight, torch.zeros(32, 5), "q")
    with pytest.raises(ValueError, match="layer: None is none of the layers that vLLM has joined"):
        load(layer, torch.zeros(4, 64), torch.zeros(48, 4))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_model():
    scheme = MXFP4RLConfig(mode="packed", outlier_fallback=0.5).weight_scheme

    class Method:
        def weight_bytes(self, layer):
            return WeightBytes.of([layer.codes], 64, 256, scheme)

    model = nn.Sequential(Joined([64], 256, 2, 1), nn.Linear(8, 8))
    needed = sum(rows * size for rows, size in packed_shapes(64, 256, scheme).values())
    model[0].codes = nn.Parameter(torch.zeros(needed, dtype=torch.uint8), requires_grad=False)
    model[1].tied = model[1].weight
    model[0].quant_method = Method()
    sizes = served_bytes(model)
    assert sizes.quantized == WeightBytes(needed, needed, 64 * 256) and sizes.quantized.in_16_bits == 2 * 64 * 256
    assert sizes.adapters == 4 * 2 * (64 + 256) and sizes.other == 4 * (64 + 8) and sizes.n_layers == 1
    assert "8.56 bits a weight" in str(sizes)
    with pytest.raises(ValueError, match="Linear has no layer that is quantized by this plugin"):
        served_bytes(model[1])
