# SPDX-License-Identifier: Apache-2.0
"""LoRA in rollouts: two products with kept factors, LoRA all the same, and PEFT's wherever it is more than that."""

import pytest
import torch
from lora_models import IDS, UP, delta, fill, with_lora
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mxfp4 import cached_weights, uncached_weights


MODES = pytest.mark.parametrize("mode", ["packed", "qat"])


class Products(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def make(load, mode="packed", dtype=torch.float32, **options):
    """A model with adapters and one of its layers."""
    model = with_lora(load("llama", mode=mode, preset="w4a16", dtype=dtype), std=0.1, **{"lora_alpha": 5, **options})
    return model, model.get_submodule(UP)


def make_x(dtype=torch.float32):
    return torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2)).to(dtype)


def is_fused(layer, x) -> bool:
    """Whether a second call scales nothing: the scaling is in a factor."""
    with torch.no_grad():
        layer(x)
        with Products() as products:
            layer(x)
    return "mul" not in products.names


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rollout_adds_in_two_products_what_the_adapter_adds(load, mode, dtype, dense_products):
    _, layer = make(load, mode, dtype)
    x = make_x(dtype)
    with torch.no_grad(), cached_weights(layer):
        layer(x)
        with Products() as products:
            found = layer(x)
        base = layer.base_layer(x)
    added = ["addmm_"] if dtype == torch.float32 else ["mm", "add_"]
    assert [name for name in products.names if "mm" in name or name in ("mul", "add", "add_")] == ["mm", "mm", *added]
    expected = base.double() + x.double() @ delta(layer).double().T
    assert found.dtype == dtype and found.shape == (2, 3, 96)
    size = expected.abs().max()
    assert (found - expected).abs().max() < (1e-6 if dtype == torch.float32 else 2**-7) * size
    assert (base.double() - expected).abs().max() > 2**-4 * size  # the adapter does something


@MODES
def test_logits_of_a_rollout_are_those_of_the_adapters(load, mode):
    model, _ = make(load, mode)
    with torch.no_grad():
        expected = model(IDS).logits
        with cached_weights(model):
            found = model(IDS).logits
    assert not torch.equal(found, expected)  # it took the other way
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_under_autocast_factors_are_in_its_dtype(load):
    _, layer = make(load, "qat")
    x = make_x()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        with cached_weights(layer):
            found = layer(x)
            assert is_fused(layer, x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 2**-6 * expected.abs().max()


def test_factors_are_kept_in_a_context_that_trusts_weights_alone(load):
    _, layer = make(load)
    x = make_x()
    assert not is_fused(layer, x)
    with uncached_weights(layer):
        assert not is_fused(layer, x)
    with cached_weights(layer):
        assert is_fused(layer, x)
        with torch.enable_grad(), Products() as products:
            layer(x)
        assert "mul" in products.names


def test_one_call_of_generate_keeps_factors_of_its_own(load):
    model, layer = make(load)
    made = []
    fused = layer._fused
    layer._fused = lambda dtype: made.append(dtype) or fused(dtype)
    model.generate(input_ids=IDS, do_sample=False, max_new_tokens=3)
    assert made == [torch.float32]


# ---- what changes ---------------------------------------------------------------------------------------------------


def changes(model, layer):
    """By name, something that changes what the adapters of the layer add, and what they add then."""
    weight = layer.lora_A["default"].weight

    def write():
        with torch.no_grad():
            weight.mul_(2)

    def replace():
        layer.lora_B["default"].weight = torch.nn.Parameter(3 * layer.lora_B["default"].weight.detach())

    return {
        "written": write,
        "replaced": replace,
        "scaled": lambda: layer.scale_layer(0.5),
        "another adapter": lambda: model.set_adapter("other"),
        "both": lambda: layer.set_adapter(["default", "other"]),
        "none": lambda: layer.enable_adapters(False),
        "merged": lambda: layer.merge(),
        "made again": lambda: remake(model),
    }


def remake(model):
    model.delete_adapter("default")
    model.add_adapter("default", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    fill(model, "default", 0.3)
    model.set_adapter("default")


CHANGES = ("written", "replaced", "scaled", "another adapter", "both", "none", "merged", "made again")


@pytest.mark.parametrize(
    ("mode", "name"),
    # To merge into a master weight is to write what the context trusts.
    [("packed", name) for name in CHANGES] + [("qat", name) for name in CHANGES if name != "merged"],
)
def test_what_adapters_become_within_a_context_is_noticed(load, mode, name):
    model, layer = make(load, mode)
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False))
    model.eval()
    x = make_x()
    with torch.no_grad():
        with cached_weights(layer):
            before = layer(x)
            changes(model, layer)[name]()
            found = layer(x)
        expected = layer(x)
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- what stays PEFT's ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options"),
    [("packed", {"lora_bias": True}), ("qat", {"lora_bias": True})],
    ids=["bias", "bias of masters"],
)
def test_more_than_plain_lora_is_to_the_bit_what_peft_computes(load, mode, options, dense_products):
    _, layer = make(load, mode, **options)
    x = make_x()
    with torch.no_grad():
        expected = layer(x)
        with cached_weights(layer):
            assert torch.equal(layer(x), expected)


def test_dropout_that_is_on_drops(load):
    _, layer = make(load, lora_dropout=0.5)
    x = make_x()
    with cached_weights(layer):
        assert is_fused(layer, x)
        layer.train()
        torch.manual_seed(0)
        with torch.no_grad():
            first, second = layer(x), layer(x)
        assert not torch.equal(first, second)
        layer.eval()
        assert is_fused(layer, x)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "lora_dropout"])
def test_who_looks_at_a_part_sees_it(load, part):
    _, layer = make(load, lora_dropout=0.5)
    x, seen = make_x(), []
    with torch.no_grad(), cached_weights(layer):
        layer(x)
        getattr(layer, part)["default"].register_forward_hook(lambda *_: seen.append(part))
        layer(x)
    assert seen == [part]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_hook_of_the_base_saw_is_not_written(load, dtype):
    _, layer = make(load, dtype=dtype)
    seen = []
    layer.base_layer.register_forward_hook(lambda module, args, output: seen.append((output, output.clone())))
    with torch.no_grad(), cached_weights(layer):
        found = layer(make_x(dtype))
    assert not torch.equal(found, seen[0][0])
    assert all(torch.equal(output, copied) for output, copied in seen) and len(seen) == 1


def test_another_adapter_for_each_sample(load):
    model, layer = make(load)
    model.add_adapter("other", LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    x = make_x()
    with torch.no_grad():
        expected = layer(x, adapter_names=["default", "other"])
        with cached_weights(layer):
            layer(x)
            assert torch.equal(layer(x, adapter_names=["default", "other"]), expected)
