# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from datasets import Dataset
from grpo_runs import MEASURED, even_digits, logged, prompts
from same_bits import assert_same, weights
from tiny_models import make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer


def test_a_rollout_that_raises_leaves_the_masters_bit_identical(build, monkeypatch):
    trainer = build()
    trainer.model.train()
    trainer.state.global_step = 3
    trainer.state.max_steps = 4
    before = weights(trainer.model)

    def fail(*args, **kwargs):
        raise MemoryError("out of memory")

    monkeypatch.setattr(trainer.model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(MemoryError):
        trainer._generate(["1+1="])
    assert_same(weights(trainer.model), before)
    norms = trainer.noise.norms.values()
    assert not any(module._forward_hooks or "forward" in module.__dict__ for module in norms)


def test_how_often_is_evaluated_does_not_change_training(build, tmp_path):
    """Its rollouts draw random numbers of their own."""
    scheme = MXFP4RLConfig(dgrad={"grad": "even+stochastic"})
    evaluations = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 4}

    def end_of(**options):
        trainer = build(scheme=scheme, max_steps=2, **options)
        trainer.train()
        logs = [logged(trainer, key) for key in ("loss", "entropy", "completions/mean_length")]
        return trainer, (weights(trainer.model), logs, torch.get_rng_state())

    _, expected = end_of()
    trainer, found = end_of(eval_dataset=prompts(1), **evaluations)
    assert sorted(logged(trainer, "eval_loss")) == [0, 1, 2]
    assert_same(found, expected)


def test_training_moves_every_master_and_logs_entropy_and_error_components(build):
    trainer = build(max_steps=-1, num_train_epochs=2, **MEASURED)
    before = weights(trainer.model)
    trainer.train()
    for name, value in trainer.model.named_parameters():
        assert not torch.equal(value, before[name]), name
    assert sorted(logged(trainer, "entropy")) == sorted(logged(trainer, "entropy/slope")) == list(range(1, 9))
    assert sorted(logged(trainer, "error/grid")) == [1, 2, 4, 6, 8]  # what was measured before step 1 is in its log
    assert {entry["step"] for entry in trainer.error_callback.history} == {0, 2, 4, 6, 8}


def test_gradient_checkpointing_trains_the_same_weights(build):
    plain = build(max_steps=2)
    plain.train()
    checkpointing = build(max_steps=2, gradient_checkpointing=True)
    checkpointing.train()
    torch.testing.assert_close(weights(checkpointing.model), weights(plain.model), rtol=0, atol=1e-6)


def test_a_rotated_scheme_has_no_error_components_and_says_so(build, caplog):
    trainer = build(scheme=MXFP4RLConfig(fprop={"rotation": "deterministic-16"}), **MEASURED)
    assert trainer.error_callback is None
    assert "no error components are measured: its fprop rotates" in caplog.text


def test_rollouts_that_keep_no_weights_keep_none_in_a_step(build):
    assert build(step_weights="uncached").quantization.form == "none"


def test_full_precision_policy_is_refused_unless_asked_for(build):
    policy = make_model(layers=1, hidden=32, intermediate=48)
    with pytest.raises(ValueError, match="no MXFP4 layer"):
        build(policy=policy)
    trainer = build(policy=policy, allow_full_precision=True, max_steps=1, **MEASURED)
    trainer.train()
    assert trainer.n_quantized == 0
    assert trainer.error_callback is trainer.movement_callback is None


EMPTY = Dataset.from_dict({"prompt": ["1+1=", ""]})
ENDLESS = build_char_tokenizer("0123456789+=")
ENDLESS.eos_token = None
SPEECHLESS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>")),
    unk_token="<unk>",
    eos_token="<eos>",
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": Dataset.from_dict({"prompt": []})}, "train_dataset is empty"),
        ({"dataset": Dataset.from_dict({"question": ["1+1="]})}, "has no column 'prompt'; it has question"),
        ({"dataset": EMPTY}, "row 1 of train_dataset has an empty prompt"),
        ({"eval_dataset": {"sums": EMPTY}}, "row 1 of eval_dataset sums has an empty prompt"),
        ({"tokenizer": ENDLESS}, "has no end-of-sequence token"),
        ({"tokenizer": SPEECHLESS}, "knows no word of"),
    ],
    ids=["empty", "no prompts", "empty prompt", "evaluated", "endless", "no vocabulary"],
)
def test_what_generation_fails_on_is_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_prompts_that_a_transform_makes_are_trained_on_and_not_made_before(build):
    made = []

    def render(rows):
        made.extend(rows["a"])
        return {"prompt": [f"{a}+1=" for a in rows["a"]], "answer": [str(a + 1) for a in rows["a"]]}

    trainer = build(dataset=Dataset.from_dict({"a": list(range(9))}).with_transform(render), max_steps=1)
    assert made == [0]
    trainer.train()
    assert trainer.state.global_step == 1
    assert len(made) > 1


def test_a_prompt_without_tokens_is_refused_where_it_is_sampled_from(build):
    trainer = build(dataset=Dataset.from_dict({"prompt": ["1+1=", ""]}).to_iterable_dataset(), max_steps=1)
    with pytest.raises(ValueError, match="a prompt has no token"):
        trainer.train()


def test_plain_grpo_config_is_refused(build, tmp_path):
    with pytest.raises(TypeError, match="must be an MXFP4GRPOConfig, got GRPOConfig"):
        MXFP4GRPOTrainer(make_model(), args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))


def test_the_name_of_a_scheme_is_refused_before_anything_is_loaded(tmp_path):
    message = "must be an MXFP4RLConfig, such as .* got 'mxfp4_rl'"
    config = MXFP4GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match=f"^quantization_config {message}"):
        MXFP4GRPOTrainer("no/such-model", even_digits, config, prompts(), quantization_config="mxfp4_rl")
    config.model_init_kwargs = {"quantization_config": "mxfp4_rl"}
    with pytest.raises(TypeError, match=f"^quantization_config in model_init_kwargs {message}"):
        MXFP4GRPOTrainer("no/such-model", even_digits, config, prompts())
