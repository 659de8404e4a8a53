# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts that were made elsewhere: on the single layers of older models, or on plain fused experts by
PEFT. Their effect is compared with sums by hand, or with PEFT on the dequantized model.
"""

import json

import pytest
import torch
from lora_models import IDS, fill, with_lora
from moe_models import make_moe
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig, merge_adapters


FILE = "adapter_model.safetensors"
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
#: What the parts of a single expert were called, and the block around the experts.
FORMER = {"mixtral": ("w1", "w3", "w2", "block_sparse_moe")}
QWEN = ("gate_proj", "up_proj", "down_proj", "mlp")
SCHEMES = {"packed": {"mode": "packed"}, "qat": {"preset": "w4a16", "dither_ties": False}}


def edit_config(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
    """A factory of saved mixtures: `folder(family)`."""

    def save(family):
        place = tmp_path / family
        if not place.exists():
            make_moe(family).save_pretrained(place)
        return place

    return save


def load(place, mode="packed"):
    scheme = MXFP4RLConfig(**SCHEMES[mode])
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, quantization_config=scheme).eval()


def save_single_layers(place, base, family, **options) -> dict[str, torch.Tensor]:
    """Save an adapter as PEFT wrote it on a model whose experts were linear layers; return its tensors by module."""
    gate, up, down, block = FORMER.get(family, QWEN)
    sizes = {}
    for name, module in make_moe(family).named_modules():
        if name.endswith(".experts"):
            experts, rows, columns = module.gate_up_proj.shape
            for expert in range(experts):
                single = f"{name.replace('.mlp.', f'.{block}.')}.{expert}"
                sizes |= {f"{single}.{gate}": (rows // 2, columns), f"{single}.{up}": (rows // 2, columns)}
                sizes |= {f"{single}.{down}": (columns, rows // 2)}
        elif isinstance(module, nn.Linear) and name.endswith(("o_proj", gate, up, down)):
            sizes[name] = (module.out_features, module.in_features)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, (rows, columns) in sizes.items():
        tensors[f"{name}.lora_A.weight"] = torch.randn(2, columns, generator=generator) * 0.1
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 2, generator=generator) * 0.1
    targets = {"target_modules": ["o_proj", gate, up, down], "base_model_name_or_path": str(base), **options}
    LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, inference_mode=True, **targets).save_pretrained(place)
    save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, place / FILE)
    return tensors


@torch.no_grad()
def summed(plain, family, tensors, scaling) -> torch.Tensor:
    """The logits of a plain model after the sums ``W + s B A`` by hand."""
    gate, up, down, block = FORMER.get(family, QWEN)

    def delta(name):
        return scaling * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]

    for name, module in plain.named_modules():
        if f"{name}.lora_A.weight" in tensors:
            module.weight += delta(name)
        elif name.endswith(".experts"):
            for expert in range(len(module.down_proj)):
                single = f"{name.replace('.mlp.', f'.{block}.')}.{expert}"
                module.gate_up_proj[expert] += torch.cat([delta(f"{single}.{gate}"), delta(f"{single}.{up}")])
                module.down_proj[expert] += delta(f"{single}.{down}")
    return plain(IDS).logits


def as_second(model, adapter):
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["o_proj"]))
    model.load_adapter(adapter, "second")
    model.set_adapter("second")
    return model


def by_transformers(model, adapter):
    model.load_adapter(adapter)
    return model


def as_folder(model, adapter):
    return load(adapter, "packed" if model.config.quantization_config.mode == "packed" else "qat")


#: Ways to load an adapter onto a model, or in its place.
WAYS = {
    "frozen": PeftModel.from_pretrained,
    "trainable": lambda model, adapter: PeftModel.from_pretrained(model, adapter, is_trainable=True).eval(),
    "second": as_second,
    "load_adapter": by_transformers,
    "folder": as_folder,
}


def assert_same_effect(found, expected, without):
    """Check that the difference is small against what the adapter does."""
    effect = (expected - without).norm()
    assert effect > 0.1
    assert (found - expected).norm() < 1e-4 * effect


def load_with_effect(base, mode, adapter, expected, way="frozen"):
    """Load an adapter onto a model and check its logits; return the model."""
    model = load(base, mode)
    without = model(IDS).logits
    model = WAYS[way](model, adapter)
    assert_same_effect(model(IDS).logits, expected, without)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", SCHEMES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_adapters_of_single_experts(folder, tmp_path, family, mode, way):
    base = folder(family)
    tensors = save_single_layers(tmp_path / "adapter", base, family)
    expected = summed(load(base, mode).dequantize(), family, tensors, 2.0)
    model = load_with_effect(base, mode, tmp_path / "adapter", expected, way)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and "experts" in name]
    assert len(trained) == {"trainable": 8, "second": 8}.get(way, 0)


@pytest.mark.parametrize("mode", SCHEMES)
def test_rank_stabilized_scaling_is_that_of_the_single_experts(folder, tmp_path, mode):
    base = folder("qwen3_moe")
    tensors = save_single_layers(tmp_path / "adapter", base, "qwen3_moe", use_rslora=True)
    expected = summed(load(base, mode).dequantize(), "qwen3_moe", tensors, 4 / 2**0.5)
    load_with_effect(base, mode, tmp_path / "adapter", expected)


@pytest.mark.parametrize("mode", SCHEMES)
def test_dense_layers_and_shared_experts_of_the_same_names_keep_their_part(folder, tmp_path, mode):
    base = folder("deepseek_v3")  # the first layer has no experts, the second one shared experts
    tensors = save_single_layers(tmp_path / "adapter", base, "deepseek_v3")
    expected = summed(load(base, mode).dequantize(), "deepseek_v3", tensors, 2.0)
    load_with_effect(base, mode, tmp_path / "adapter", expected)


@pytest.mark.parametrize("way", ["frozen", "load_adapter"])
def test_a_part_that_has_no_place_is_an_error(folder, tmp_path, way):
    base = folder("qwen3_moe")
    save_single_layers(tmp_path / "adapter", base, "qwen3_moe")
    edit_config(tmp_path / "adapter", target_modules=["o_proj"])
    with pytest.raises(ValueError, match=r"8 tensors of the adapter have no place .*layers\.0\.mlp\.exper"):
        WAYS[way](load(base), tmp_path / "adapter")


def plain_adapter(place, base, **options):
    """Save an adapter of fused experts that PEFT made on the plain model."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = {"target_modules": ["q_proj"], "target_parameters": TARGETS, **options}
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", r=2, **targets))
    fill(model, "default", 0.1)
    model.save_pretrained(place)


@pytest.mark.parametrize("mode", SCHEMES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_plain_fused_experts(folder, tmp_path, family, mode):
    base = folder(family)
    parameters = [*TARGETS, *(["experts.down_proj_bias"] if family == "gpt_oss" else [])]
    plain_adapter(tmp_path / "adapter", base, target_parameters=parameters)
    expected = PeftModel.from_pretrained(load(base, mode).dequantize(), tmp_path / "adapter").eval()(IDS).logits
    load_with_effect(base, mode, tmp_path / "adapter", expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_packed_experts_work_on_the_plain_model(folder, tmp_path, family):
    base = folder(family)
    model = with_lora(load(base), std=0.1, target_modules=["q_proj", "experts"])
    expected = model(IDS).logits
    with model.disable_adapter():
        without = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(load(base).dequantize(), tmp_path / "adapter").eval()
    assert_same_effect(plain(IDS).logits, expected, without)


def test_merging_an_adapter_of_single_experts(folder, tmp_path):
    base = folder("qwen3_moe")
    tensors = save_single_layers(tmp_path / "adapter", base, "qwen3_moe")
    expected = summed(load(base).dequantize(), "qwen3_moe", tensors, 2.0)
    plain = merge_adapters(PeftModel.from_pretrained(load(base), tmp_path / "adapter"), into="bf16").float()
    torch.testing.assert_close(plain(IDS).logits, expected, rtol=0.05, atol=0.05)


# ---- targets ---------------------------------------------------------------------------------------------------------


def adapted(model) -> dict[str, int]:
    """The ranks of adapters by the names of modules without adapters, of parameters for experts."""
    found = {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            name = f"{name.replace('.base_layer', '')}.{getattr(module, 'parameter_name', '')}".rstrip(".")
            found[name] = module.r["default"]
    return found


def ranks(layer: int, gate_up: int = 4, down: int = 4) -> dict[str, int]:
    """Adapters on both projections of a layer's experts."""
    experts = f"model.layers.{layer}.mlp.experts"
    return {f"{experts}.gate_up_proj": gate_up, f"{experts}.down_proj": down}


LAST_QUERY = {"model.layers.1.self_attn.q_proj": 4}
#: Options of targets, and the ranks of the adapters that they give.
ADAPTED = [
    ({"target_modules": ["experts"]}, ranks(0) | ranks(1)),
    ({"target_modules": ["gate_proj", "up_proj", "down_proj"]}, ranks(0, gate_up=8) | ranks(1, gate_up=8)),
    ({"target_modules": ["experts"], "layers_to_transform": [1]}, ranks(1)),
    ({"target_modules": ["experts"], "rank_pattern": {"0.mlp.experts": 2}}, ranks(0, 2, 2) | ranks(1)),
    ({"target_modules": r".*\.1\..*\.(q_proj|experts)"}, ranks(1) | LAST_QUERY),
    ({"target_modules": r".*\.1\..*\.q_proj"}, LAST_QUERY),
    ({"target_modules": ["gate"]}, {f"model.layers.{n}.mlp.gate.weight": 4 for n in range(2)}),
]


@pytest.mark.parametrize(("options", "expected"), ADAPTED, ids=str)
@pytest.mark.parametrize("mode", SCHEMES)
def test_what_is_adapted(folder, options, expected, mode):
    assert adapted(with_lora(load(folder("qwen3_moe"), mode), **options)) == expected


def test_without_targets_mixtral_gets_pefts_defaults(folder):
    model = with_lora(load(folder("mixtral")), target_modules=None)
    assert adapted(model) == {f"model.layers.{n}.self_attn.{name}_proj": 4 for n in range(2) for name in "qv"}


def test_dropout_of_packed_experts_is_on_in_training_alone(folder):
    model = with_lora(load(folder("qwen3_moe")), std=0.1, target_modules=["experts"], lora_dropout=0.5)
    torch.manual_seed(0)
    evaluated = model(IDS).logits
    again = model(IDS).logits
    one = model.train()(IDS).logits
    other = model(IDS).logits
    assert torch.equal(evaluated, again)
    assert not torch.equal(one, other)
