# SPDX-License-Identifier: Apache-2.0
"""`MXFP4PackedExperts` against the trainable experts of the same scheme."""

import copy
import gc
import pickle

import pytest
import torch
from tiny_models import make_model

from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig, cached_weights
from hf_mxfp4.layers import MXFP4PackedExperts


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"]
CONFIG = MXFP4RLConfig(outlier_fallback=None)


def twins(family="qwen3_moe", config=CONFIG, dtype=torch.float32):
    """Trainable experts and their packed twin."""
    experts = make_model(family, layers=1, dtype=dtype).model.layers[0].mlp.experts
    trained = MXFP4Experts.from_experts(experts, config, "mlp.experts")
    return trained, MXFP4PackedExperts.from_experts(trained, config.packed(), "mlp.experts")


def routing(dtype=torch.float32, tokens=19):
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(tokens, 4, generator=generator).topk(2).indices
    return (
        torch.randn(tokens, 64, generator=generator).to(dtype),
        index,
        torch.rand(tokens, 2, generator=generator).to(dtype),
    )


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_repeat_the_trainable_ones(family, dtype):
    trained, packed = twins(family, dtype=dtype)
    states, index, weights = routing(dtype)
    inputs = [t.clone().requires_grad_() for t in (states, states)]
    outs = [layer(x, index, weights) for layer, x in zip((trained, packed), inputs, strict=True)]
    assert torch.equal(*outs)
    for out in outs:
        out.float().square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad) and inputs[0].grad.abs().sum() > 0
    if family == "gpt_oss":
        assert packed.down_proj_bias is trained.down_proj_bias
    assert {p.dtype for n, p in packed.named_parameters() if not n.endswith("bias")} == {torch.uint8}
    assert not any(p.requires_grad for n, p in packed.named_parameters() if not n.endswith("bias"))


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_few_tokens_are_the_trainable_ones_up_to_float32_sums(family):
    trained, packed = twins(family)
    inputs = routing()
    # Two products one after the other, of sums of at most 96 terms.
    torch.testing.assert_close(packed(*inputs), trained(*inputs), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_experts_again(family):
    trained, packed = twins(family)
    plain, expected = packed.to_experts(), trained.to_experts()
    assert type(plain) is type(expected) and plain.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in plain.state_dict().items())
    assert packed.to_experts(torch.bfloat16).down_proj.dtype == torch.bfloat16
    assert packed.gate_up_proj.dtype == torch.uint8
    if family == "gpt_oss":
        assert plain.down_proj_bias is not packed.down_proj_bias


def test_tensors_and_shapes():
    _, packed = twins("gpt_oss", MXFP4RLConfig())
    packed.check()
    assert packed.shapes() == {name: tuple(p.shape) for name, p in packed.named_parameters() if "bias" not in name}
    assert packed.quantized_tensor("down_proj", 1).dequantize(torch.float32).shape == (64, 96)
    packed.down_proj_scale = None
    with pytest.raises(ValueError, match="mlp.experts.down_proj_scale is missing; expected uint8 .4, 64, 3."):
        packed.check()


def test_nothing_is_kept_of_what_was_dequantized():
    _, packed = twins()
    inputs = routing()

    def matrices():
        gc.collect()
        return [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-2:] == (64, 64)]

    others = matrices()  # of other tests
    with torch.no_grad(), cached_weights(packed):
        packed(*inputs)
        assert len(matrices()) == len(others)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies(copied):
    _, packed = twins()
    assert torch.equal(copied(packed)(*routing()), packed(*routing()))


def test_dtype_follows_to():
    _, packed = twins("gpt_oss")
    packed.to(torch.bfloat16)
    assert packed.compute_dtype == torch.bfloat16 and packed.gate_up_proj.dtype == torch.uint8
    assert packed(*routing(torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="input is torch.float32 but the layer's dtype is torch.bfloat16"):
        packed(*routing())


def test_float_tensors_are_not_rounded_into_it():
    _, packed = twins()
    state = packed.state_dict()
    state["down_proj"] = torch.ones(4, 64, 16)
    with pytest.raises(RuntimeError, match="down_proj is torch.float32, but packed experts need the uint8 tensor"):
        packed.load_state_dict(state)
    packed.down_proj = torch.nn.Parameter(torch.ones(4, 64, 32))
    with pytest.raises(TypeError, match="down_proj was replaced by a tensor of torch.float32"):
        packed(*routing())


def test_a_state_dict_is_read():
    _, packed = twins()
    _, other = twins()
    for tensor in other.state_dict().values():
        tensor.zero_()
    assert not torch.equal(other(*routing()), packed(*routing()))
    other.load_state_dict(packed.state_dict())
    assert torch.equal(other(*routing()), packed(*routing()))


def test_what_cannot_be_packed():
    trained, packed = twins()
    with pytest.raises(ValueError, match="needs a config of mode='packed'"):
        MXFP4PackedExperts.from_experts(trained, MXFP4RLConfig())
    packed._parameters["gate_up_proj"] = torch.nn.Parameter(torch.zeros(4, 64, 64, dtype=torch.uint8), False)
    plain = trained.to_experts()
    plain.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 64, 64, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match="gate_up_proj is of torch.uint8; nothing to quantize"):
        MXFP4PackedExperts.from_experts(plain, CONFIG.packed())


@pytest.mark.usefixtures("dense_products")
def test_selective_fallback_is_the_trainable_experts():
    config = MXFP4RLConfig(outlier_fallback_rate=0.2)
    trained, _ = twins(config=config)
    packed = MXFP4PackedExperts.from_experts(trained, config.packed())
    assert torch.equal(packed(*routing()), trained(*routing()))
