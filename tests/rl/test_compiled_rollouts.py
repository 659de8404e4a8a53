# SPDX-License-Identifier: Apache-2.0
"""`compile_rollouts`: the tokens and the training of eager rollouts, in two graphs, whatever changes from step to step.

The contract is that of `tests/layers/test_compiled.py`: under ``aot_eager`` the bits of eager mode. Adapters' own small
products differ from those by a rounding.
"""

import copy
from collections import Counter

import pytest
import torch
from grpo_runs import trainer_factory
from moe_models import make_moe
from peft import LoraConfig
from torch._dynamo.backends.debugging import aot_eager

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.numerics import MXFP4Tensor
from hf_mxfp4.rl.rollout.generation import _static_caches


IDS = torch.tensor([[0, 2, 3, 4], [5, 6, 7, 8]])
#: Blocks of largest error of each row.
SELECTIVE = {"preset": "w4a4", "outlier_fallback": 0.5, "outlier_fallback_rate": 0.1}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear"}
#: Noise that changes tokens: none at the first of four steps, then less and less.
NOISE = {"aqn_num_stages": 4, "aqn_sigma_start": 0.5, "aqn_sigma_end": 0.1}


@pytest.fixture
def graphs():
    """The operators of ours in each graph that was compiled."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


@pytest.fixture
def build(tmp_path, graphs):
    factory = trainer_factory(tmp_path, layers=1)  # one layer compiles in half the time of two

    def compiler(graph, inputs, **options):
        graphs.append([str(node.target) for node in graph.graph.nodes if "hf_mxfp4" in str(node.target)])
        return aot_eager(graph, inputs)

    def build(mode="qat", compile_rollouts=True, **options):
        scheme = options.pop("scheme", {"preset": "w4a4"} if mode == "qat" else {})
        if mode == "lora":
            options |= {"peft_config": LoraConfig(**LORA)}
        trainer = factory(
            scheme=MXFP4RLConfig(mode="qat" if mode == "qat" else "packed", **scheme),
            compile_rollouts=compile_rollouts,
            **{**NOISE, "learning_rate": 1e-2, **options},
        )
        if compile_rollouts:
            compiling = trainer.generation_config.compile_config
            compiling.backend, compiling.mode, compiling.fullgraph = compiler, None, True
        return trainer

    return build


def trained(trainer):
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return rewards, [parameter.detach().clone() for parameter in trainer.model.parameters()]


def operators(graph):
    """The products in a graph, by name and number."""
    return Counter(name.split(".")[1] for name in graph)


def check_training(build, graphs, **options):
    # Compiled code rounds otherwise, which the correction sees.
    options["rollout_correction"] = False
    expected = trained(build(compile_rollouts=False, **options))
    trainer = build(**options)
    found = trained(trainer)
    assert found[0] == expected[0] and len(found[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert len(graphs) == 2  # without noise, and with
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < (2e-2 if trainer.args.bf16 else 1e-5)
    return operators(graphs[0]), operators(graphs[1])


# ---- training -------------------------------------------------------------------------------------------------------


TRAININGS = [
    ("qat", "packed_linear", {"bf16": True, "gradient_checkpointing": True, "rollout_weights": "packed"}),
    ("lora", "packed_linear", {}),
    ("qat", "packed_linear", {}),
    ("qat", "quantized_linear", {"rollout_weights": "dense"}),
    ("qat", "quantized_linear", {"scheme": SELECTIVE, "rollout_weights": "packed"}),
    ("qat", "quantized_linear", {"scheme": SELECTIVE, "cache_rollout_weights": False}),
    ("lora", "packed_linear", {"gradient_checkpointing": True, "scheme": {"preset": "w4a4"}}),
]


@pytest.mark.parametrize(
    ("mode", "product", "options"),
    [pytest.param(*case, marks=pytest.mark.large if n else ()) for n, case in enumerate(TRAININGS)],
    ids=str,
)
def test_compiled_rollouts_train_the_same_weights(build, graphs, mode, product, options):
    """Products with packed weights are functions of tensors, which CUDA graphs can hold; others have state."""
    found = check_training(build, graphs, mode=mode, **options)
    assert found == (Counter({product: 7}),) * 2


@pytest.mark.large
def test_mixtures_of_experts(build, graphs):
    def policy():
        model = make_moe("qwen3_moe")
        quantize_linears(model, MXFP4RLConfig(preset="w4a4"))
        return model

    expected = trained(build(compile_rollouts=False, policy=policy()))
    found = trained(build(policy=policy()))
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert len(graphs) == 2


# ---- what a graph must not hold -------------------------------------------------------------------------------------


def logits(trainer, compiled, step):
    """Of greedy tokens at an optimizer step, as rollouts compute them."""
    config = copy.deepcopy(trainer.generation_config)
    config.do_sample, config.return_dict_in_generate, config.output_logits = False, True, True
    config.eos_token_id, config.max_new_tokens, config.disable_compile = None, 6, not compiled
    trainer.state.global_step, trainer.state.max_steps = step, 4
    with torch.no_grad(), trainer._rollout_policy(), _static_caches(trainer.model):
        return torch.stack(trainer.model.generate(input_ids=IDS, generation_config=config).logits)


@pytest.mark.parametrize("mode", ["qat", pytest.param("lora", marks=pytest.mark.large)])
def test_logits_follow_noise_weights_and_evaluation(build, graphs, mode):
    trainer = build(mode, rollout_weights="packed")
    seen = []

    def check(step, n_graphs):
        seen.append(logits(trainer, compiled=True, step=step))
        tolerance = {"rtol": 0, "atol": 0} if mode == "qat" else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(seen[-1], logits(trainer, compiled=False, step=step), **tolerance)
        assert len(graphs) == n_graphs

    trainer.model.train()
    check(0, 1)
    check(1, 2)  # noise sets in,
    check(2, 2)  # and is drawn anew
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    check(2, 2)  # an update that autograd does not see
    check(0, 2)
    trainer.model.eval()
    check(2, 3)
    assert all(not torch.equal(a, b) for a, b in zip(seen, seen[1:-1], strict=False))
    assert torch.equal(seen[-1], seen[-2])  # evaluation is without noise
    with trainer.generation.weight_copies():
        logits(trainer, compiled=True, step=2)
        kept = [m.state.cache.value for m in trainer.model.modules() if isinstance(m, MXFP4Linear)]
    assert all(isinstance(value, MXFP4Tensor) for value in kept) and len(kept) == (7 if mode == "qat" else 0)


def test_prompts_of_other_lengths_need_no_compilation(build, graphs):
    trainer = build()
    trainer.model.train()
    own = trainer.model.generation_config
    for prompts in (["1+1=", "2+2="], ["1+11=", "2+222="], ["9" * 40 + "=", "1="]):
        assert len(trainer._generate(prompts)[1]) == 2
    assert len(graphs) == 1
    for length in (70, 100, 140, 240):  # larger caches: once more, for all sizes
        trainer._generate(["9" * length + "=", "1="])
    assert len(graphs) == 2
    assert "generate" not in vars(trainer.model) and trainer.model.generation_config is own


@pytest.mark.parametrize("mode", ["lora", pytest.param("qat", marks=pytest.mark.large)])
def test_the_models_own_kind_of_cache_is_left_alone(build, graphs, mode):
    trainer = build(mode)
    trainer.model.generation_config.cache_implementation = "static"
    assert len(trainer._generate(["1+1="])[1]) == 1
    assert trainer.model.generation_config.cache_implementation == "static" and len(graphs) == 1


@pytest.mark.large
def test_the_default_compiler_agrees_to_rounding(build):
    trainer = build()
    compiling = trainer.generation_config.compile_config
    compiling.backend, compiling.mode = "inductor", "reduce-overhead"
    trainer.model.train()
    for step in (0, 1, 2):
        found, expected = (logits(trainer, compiled, step) for compiled in (True, False))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"cache_implementation": "offloaded"}, {"generation_kwargs": {"use_cache": False}}], ids=str
)
def test_other_caches_are_refused(build, options):
    with pytest.raises(ValueError, match="static key-value cache"):
        build(**options)
