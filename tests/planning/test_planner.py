# SPDX-License-Identifier: Apache-2.0
"""Plans of small models: counts by hand, what fits, and what is said where nothing does."""

from dataclasses import replace

import pytest
import torch
from tiny_models import make_model
from transformers import Qwen2Config, Qwen3MoeConfig

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.planning import STRATEGIES, Planner, Setup, read_config
from hf_mxfp4.planning.meta_model import build
from hf_mxfp4.planning.sizes import model_sizes


H, INNER, LAYERS, VOCABULARY = 64, 96, 2, 128
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
DENSE = Qwen2Config(**COMMON)
MOE = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, **COMMON)
#: q, k, v, o, gate, up, down.
QUANTIZED = LAYERS * (H * (H + 32 + 32 + H) + 3 * H * INNER)
SETUP = Setup(MXFP4RLConfig(), batch=2, prompt=16, completion=16, gpu_memory=1e9)


@pytest.fixture(scope="module")
def planner():
    return Planner(DENSE, SETUP)


def plans(planner, setup):
    return {plan.strategy.name: plan for plan in planner.plan(setup)}


def test_sizes_of_a_dense_model():
    model, _ = build(DENSE, MXFP4RLConfig(), torch.float32)
    real = make_model("qwen2", vocab_size=VOCABULARY)
    sizes = model_sizes(model)
    assert sizes.elements == sizes.trained_elements == sum(p.numel() for p in real.parameters())
    assert sizes.quantized_elements == sizes.cached_elements == QUANTIZED
    assert sizes.largest_copy == H * INNER
    assert (sizes.vocabulary, sizes.hidden, sizes.widest, sizes.head_trained) == (VOCABULARY, H, INNER, True)
    assert sizes.outside_elements == 2 * VOCABULARY * H + H
    assert sizes.layer_elements == (sizes.elements - sizes.outside_elements) // LAYERS


def test_sizes_of_packed_weights_with_adapters():
    model, _ = build(DENSE, MXFP4RLConfig(mode="packed"), torch.bfloat16, lora_rank=4)
    sizes = model_sizes(model)
    features = LAYERS * ((H + H) + 2 * (H + 32) + (H + H) + 3 * (H + INNER))
    assert sizes.trained_elements == 4 * features and not sizes.head_trained
    assert sizes.quantized_elements == QUANTIZED


def test_experts_count_as_quantized_weights_by_their_shapes():
    attention = LAYERS * H * (H + 32 + 32 + H)
    experts = LAYERS * 4 * 3 * H * 48
    model, _ = build(MOE, MXFP4RLConfig(), torch.float32)
    assert model_sizes(model).quantized_elements == attention + experts
    skipped, _ = build(MOE, MXFP4RLConfig(modules_to_not_convert=["experts"]), torch.float32)
    assert model_sizes(skipped).quantized_elements == attention
    packed, _ = build(MOE, MXFP4RLConfig(mode="packed", macro_block=None), torch.bfloat16)
    masters, _ = build(MOE, None, torch.bfloat16)
    saved = (attention + experts) * (16 - 4.25) / 8
    # Blocks of a row of 48 are padded to 64 elements: one scale byte more per 48 of the way down.
    padding = LAYERS * 4 * H * (2 - 48 / 32)
    assert model_sizes(masters).weights - model_sizes(packed).weights == saved - padding


def test_packed_experts_have_no_adapters():
    model, _ = build(MOE, MXFP4RLConfig(mode="packed"), torch.bfloat16, lora_rank=4)
    assert model_sizes(model).trained_elements == LAYERS * 4 * ((H + H) + 2 * (H + 32) + (H + H))


def test_experts_keep_what_their_tokens_need():
    held = []
    for form in ("full", "mxfp4"):
        config = MXFP4RLConfig(saved_activations=form, outlier_fallback=None, macro_block=None)
        planner = Planner(MOE, replace(SETUP, quantization=config))
        held.append(planner.model(False).activations(32, logits=False).held[1])
    # Per token and layer: q, k and v share 64 inputs, o has 64; of each of two experts the way up has 64, the way down
    # 48, whose 1.5 blocks have two scale bytes.
    values = 32 * LAYERS * (2 * H + 2 * (H + 48))
    assert held[0] - held[1] == values * (16 - 4.25) / 8 - 32 * LAYERS * 2 * (2 - 1.5)


def test_parts_of_one_gpu(planner):
    plan = plans(planner, replace(SETUP, checkpointing=False))["DDP"]
    n = planner.model(False).sizes.elements
    assert [plan.training[name] for name in ("gradients", "optimizer")] == [4 * n, 8 * n]
    assert plan.training["quantized weights"] == plan.rollouts["quantized weights"] == 2 * QUANTIZED
    assert "gradients" not in plan.rollouts
    # Keys and values of one head of 32, in float32 as the rotary embedding leaves them.
    assert plan.rollouts["KV cache"] == 2 * 32 * LAYERS * 2 * 32 * 4
    assert plan.peak == max(sum(plan.training.values()), sum(plan.rollouts.values()))


def test_checkpointing_holds_one_quantized_weight_at_a_time(planner):
    assert plans(planner, SETUP)["DDP"].training["quantized weights"] == 2 * H * INNER


def test_several_gpus_keep_quantized_weights_in_rollouts_alone(planner):
    plan = plans(planner, replace(SETUP, gpus=2))["DDP"]
    assert plan.training["quantized weights"] == 2 * H * INNER
    assert plan.rollouts["quantized weights"] == 2 * QUANTIZED


def test_rollouts_without_kept_copies_hold_one_at_a_time(planner):
    setup = replace(SETUP, gpus=2, cache_rollout_weights=False)
    found, kept = plans(planner, setup), plans(planner, replace(SETUP, gpus=2))
    for name, plan in found.items():
        assert plan.rollouts["quantized weights"] == 2 * H * INNER
        assert plan.training == kept[name].training
        others = {part: size for part, size in plan.rollouts.items() if part != "quantized weights"}
        assert others.items() < kept[name].rollouts.items()
        assert kept[name].rollouts["quantized weights"] == 2 * QUANTIZED


def test_packed_copies_take_a_quarter_and_packed_layers_need_none(planner):
    setup = replace(SETUP, gpus=2, rollout_weights="packed")
    found = {name: plan.rollouts["quantized weights"] for name, plan in plans(planner, setup).items()}
    one_dense = 2 * H * INNER
    # Macro blocks of 128 and the residual of the default config: 4.25 bits twice, and a byte for 128.
    assert found["DDP"] == one_dense + QUANTIZED * (2 * 4.25 / 8 + 1 / 128)
    assert found["packed+LoRA, FSDP2"] == one_dense
    w4a16 = replace(setup, quantization=MXFP4RLConfig(preset="w4a16", macro_block=None, outlier_fallback=None))
    kept = plans(Planner(DENSE, w4a16), w4a16)["DDP"].rollouts["quantized weights"]
    assert kept == one_dense + QUANTIZED * 4.25 / 8
    none = replace(setup, cache_rollout_weights=False)
    assert plans(planner, none)["DDP"].rollouts["quantized weights"] == one_dense


def test_what_a_step_keeps_where_weights_are_whole(planner):
    one_dense, codes = 2 * H * INNER, QUANTIZED * (2 * 4.25 / 8 + 1 / 128)
    for step, rollouts, training, sampling in (
        ("packed", "packed", one_dense + codes, one_dense + codes),
        ("packed", "dense", one_dense + codes, 2 * QUANTIZED + codes),
        ("dense", "packed", 2 * QUANTIZED + codes, one_dense + codes),
        ("dense", "dense", 2 * QUANTIZED, 2 * QUANTIZED),
    ):
        found = plans(planner, replace(SETUP, gpus=2, step_weights=step, rollout_weights=rollouts))
        without = plans(planner, replace(SETUP, gpus=2, rollout_weights=rollouts))
        for name in ("DDP", "ZeRO-2"):
            assert found[name].training["quantized weights"] == training, (step, rollouts)
            assert found[name].rollouts["quantized weights"] == sampling, (step, rollouts)
        for name in found.keys() - {"DDP", "ZeRO-2"}:
            assert found[name] == without[name]
    uncached = replace(SETUP, step_weights="dense", cache_rollout_weights=False)
    assert plans(planner, uncached)["DDP"].training["quantized weights"] == one_dense
    with pytest.raises(ValueError, match="step_weights='sparse' is not known"):
        replace(SETUP, step_weights="sparse")


def test_which_copies_of_experts_exist_in_rollouts():
    attention, experts = LAYERS * H * (H + 32 + 32 + H), LAYERS * 4 * 3 * H * 48
    planner = Planner(MOE, SETUP)
    kept, single = (
        {name: p.rollouts["quantized weights"] for name, p in plans(planner, replace(SETUP, gpus=2, **o)).items()}
        for o in ({}, {"cache_rollout_weights": False})
    )
    assert kept["FSDP2"] == 2 * (attention + experts)
    assert single["FSDP2"] == 2 * 4 * 2 * H * 48  # the way up of one layer's experts, gates included
    packed = plans(planner, replace(SETUP, gpus=2, rollout_weights="packed"))["FSDP2"].rollouts["quantized weights"]
    assert packed == single["FSDP2"] + (attention + experts) * (2 * 4.25 / 8 + 1 / 128)
    assert kept["packed+LoRA, FSDP2"] == 2 * attention  # packed experts are dequantized one by one
    assert single["packed+LoRA, FSDP2"] == 2 * 2 * H * 48


def test_advice_to_keep_no_copies(planner):
    strategies = tuple(strategy for strategy in STRATEGIES if strategy.engine == "fsdp2" and not strategy.packed)
    setup = replace(SETUP, gpus=64, batch=1, prompt=2, completion=2)
    (plan,), (single,) = (planner.plan(replace(setup, cache_rollout_weights=c), strategies) for c in (True, False))
    assert sum(plan.rollouts.values()) > sum(plan.training.values())
    between = replace(setup, gpu_memory=(plan.peak + single.peak) / 2 / 0.9)
    assert "cache_rollout_weights: false (slower rollouts)" in planner.advice(between, strategies)
    too_small = replace(setup, gpu_memory=single.peak / 2)
    for other in (too_small, replace(between, cache_rollout_weights=False)):
        assert not any("cache_rollout_weights" in text for text in planner.advice(other, strategies))


def test_a_vllm_server_takes_the_rollouts(planner):
    assert all(plan.rollouts == {} for plan in planner.plan(replace(SETUP, rollouts=False)))


def test_checkpointing_saves_and_batch_costs(planner):
    def saved(**changes):
        return plans(planner, replace(SETUP, **changes))["DDP"].training["saved activations"]

    assert saved() < saved(checkpointing=False)
    one, two, three = (saved(batch=batch, checkpointing=False) for batch in (1, 2, 3))
    assert three - two == two - one > 0


def test_a_reference_model_is_there_for_full_training_alone(planner):
    found = plans(planner, replace(SETUP, reference=True, gpus=2))
    weights = planner.model(False).sizes.weights
    assert found["DDP"].training["reference model"] == found["DDP"].rollouts["reference model"] == weights
    assert found["packed+LoRA, DDP"].training["reference model"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_the_largest_batch_fits_and_the_next_one_does_not(planner, strategy):
    setup = replace(SETUP, gpus=2, gpu_memory=8e6)
    (plan,) = planner.plan(setup, (strategy,))
    assert plan.largest_batch > 0
    (at_most,) = planner.plan(replace(setup, batch=plan.largest_batch), (strategy,))
    (too_many,) = planner.plan(replace(setup, batch=plan.largest_batch + 1), (strategy,))
    assert at_most.fits and at_most.peak <= 0.9 * 8e6 < too_many.peak and not too_many.fits


def test_advice_is_true(planner):
    full = tuple(strategy for strategy in STRATEGIES if not strategy.packed)
    setup = replace(SETUP, gpus=1, gpu_memory=2e6, batch=4, checkpointing=False)
    assert not any(plan.fits for plan in planner.plan(setup, full))
    advice = planner.advice(setup, full)
    gpus = next(text for text in advice if "GPUs (" in text)
    number = int(gpus.split()[0])
    fitting = [plan.strategy.name for plan in planner.plan(replace(setup, gpus=number), full) if plan.fits]
    assert fitting and gpus == f"{number} GPUs ({', '.join(fitting)})"
    assert not any(plan.fits for plan in planner.plan(replace(setup, gpus=number // 2), full))
    assert any(text.startswith("mode packed (packed+LoRA, DDP") for text in advice)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "gpus=0 must be at least 1"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"optimizer": "lion"}, "optimizer='lion' is not known; choose one of adamw"),
        ({"logits": "some"}, "choose 'chunked' or 'full'"),
        ({"headroom": 1}, "headroom must be in"),
    ],
)
def test_setups_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SETUP, **changes)


def test_where_a_config_is_read_from(tmp_path):
    DENSE.save_pretrained(tmp_path)
    assert read_config(str(tmp_path)).hidden_size == H
    assert read_config(str(tmp_path / "config.json")).hidden_size == H
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        read_config(str(tmp_path / "other"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad.json cannot be read as a config.json: KeyError\('model_type'\)"):
        read_config(str(tmp_path / "bad.json"))


def test_a_config_that_carries_a_scheme_is_planned_under_the_one_given():
    config = Qwen2Config(**COMMON, quantization_config=MXFP4RLConfig(preset="w4a16").to_dict())
    model, _ = build(config, None, torch.float32)
    assert model_sizes(model).quantized_elements == 0
