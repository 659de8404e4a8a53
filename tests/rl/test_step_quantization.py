# SPDX-License-Identifier: Apache-2.0
"""Each weight is quantized once per optimizer step: counted, and the same bits as quantizing it for each use, whatever
writes weights between two steps."""

import functools
import weakref

import pytest
import torch
from grpo_runs import logged, prompts
from moe_models import make_moe
from peft import LoraConfig
from same_bits import assert_same, tensors_in, weights
from transformers import TrainerCallback

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.ops import weight_operand


#: Four micro-batches of two sequences, of two groups.
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2}
#: The old log-probabilities are computed too: one rollout is trained on for two optimizer steps, twice.
REUSED = {"num_iterations": 2, "steps_per_generation": 8, "max_steps": 4, "dataset": prompts(16)}
STOCHASTIC = {"preset": "w4a4g4", "fprop": {"weight": "rceil+stochastic", "rotation": "random-16"}}


def ended(trainer):
    """What a run comes to: its weights, and what it logged of them."""
    keys = ("loss", "entropy", "grad_norm", "kl", "sampling/kl", "eval_loss", "completions/mean_length")
    return weights(trainer.model), [logged(trainer, key) for key in keys]


def train(build, tmp_path, form, **options):
    trainer = build(step_weights=form, output_dir=str(tmp_path / form), **{**ACCUMULATED, **options})
    trainer.train()
    return trainer


def counts(trainer, gemm=""):
    return list(logged(trainer, f"quantization/{gemm}weights_per_step").values())


#: Scheme, options, and how often 14 matrices are quantized without what is kept, per optimizer step: in the rollout,
#: for old log-probabilities two sequences at a time, and in each pass.
RUNS = {
    "w4a16, checkpointing": ({"preset": "w4a16"}, {"gradient_checkpointing": True}, [9, 9]),
    "w4a4g4": ({"preset": "w4a4g4"}, {}, [5, 5]),
    "two iterations": ({}, REUSED, [13, 4, 4, 4]),
    "stochastic": (STOCHASTIC, {}, [5, 5]),
    "bfloat16": ({"preset": "w4a4"}, {"bf16": True}, [5, 5]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.large if n in ("two iterations", "bfloat16") else ()) for n in RUNS]
)
def test_once_per_optimizer_step(build, tmp_path, name):
    scheme, options, without = RUNS[name]
    found = {}
    # Weights that are rounded at random are not kept as codes.
    for form in ("auto", "none") if name == "stochastic" else ("auto", "packed", "none"):
        trainer = train(build, tmp_path, form, scheme=MXFP4RLConfig(**scheme), **options)
        expected = [14] * len(without) if form != "none" else [14 * times for times in without]
        assert counts(trainer) == expected, form
        # Along the other axis, for the gradient of each input but the first layer's three.
        assert counts(trainer, "dgrad_") == ([4 * 14] * len(without) if scheme.get("preset") == "w4a4g4" else [])
        found[form] = ended(trainer)
    assert_same(found["auto"], found["none"])
    assert_same(found.get("packed", found["none"]), found["none"])


def test_quantized_weights_stay_in_their_memory_until_training_ends(build, tmp_path):
    trainer = build(step_weights="dense", output_dir=str(tmp_path), **ACCUMULATED)
    layer = next(module for module in trainer.model.modules() if isinstance(module, MXFP4Linear))
    kept = []  # so that no other tensor gets the address of one of them
    layer.register_forward_hook(lambda *_: kept.append(weight_operand(layer.weight, layer.weight.dtype, layer.state)))
    trainer.train()
    assert len(kept) > 2
    assert len({values.data_ptr() for values in kept}) == 1
    last = weakref.ref(kept[-1])
    kept.clear()
    assert last() is None


def test_the_reference_and_the_policy_once_each(build, tmp_path):
    """The reference is written too, by `sync_ref_model`, which mixes master weights after the second of three steps."""
    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, "beta": 0.1}
    options |= {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    options["scheme"] = MXFP4RLConfig(smooth=False)  # the masters are those of the folder
    found = []
    for form, times in (("auto", 2), ("none", 9)):
        trainer = train(build, tmp_path, form, **options)
        assert counts(trainer) == [14 * times] * 3
        base, trained = (tensors_in(folder) for folder in (tmp_path / "base", tmp_path / form / "checkpoint-2"))
        for name, value in trainer.ref_model.named_parameters():
            assert torch.allclose(value, 0.5 * base[name] + 0.5 * trained[name], atol=1e-6), name
        found.append(ended(trainer))
    assert_same(*found)


def test_adapters_on_trainable_layers(build, tmp_path, caplog):
    """Without them the policy is the reference, on the very same copies."""
    caplog.set_level("INFO", "hf_mxfp4")
    found = []
    for form, times in (("auto", 1), ("none", 9)):
        options = {"peft_config": LoraConfig(target_modules="all-linear", r=2), "beta": 0.1, **ACCUMULATED}
        torch.manual_seed(0)
        trainer = build(step_weights=form, output_dir=str(tmp_path / form), **options)
        assert "n_quantized=14, noise on 5 norms, rollout correction token_truncate" in caplog.text
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        assert counts(trainer) == [14 * times] * 2
        changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
        assert changed == {name for name in before if "lora_" in name}
        found.append(ended(trainer))
    assert_same(*found)


def test_each_matrix_of_experts_once(build, tmp_path, dense_products):
    found = []
    for form in ("dense", "packed", "none"):
        policy = make_moe(num_hidden_layers=1)
        quantize_linears(policy, MXFP4RLConfig())
        trainer = train(build, tmp_path, form, policy=policy)
        assert trainer.n_quantized == 4 + 6 * 2
        # The passes of training on a CPU, too, take the matrices of all experts.
        assert counts(trainer) == [trainer.n_quantized * (5 if form == "none" else 1)] * 2
        found.append(ended(trainer))
    for other in found[1:]:
        assert_same(other, found[0])


EVENTS = ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "log", "save", "evaluate")


class Writes(TrainerCallback):
    """Writes all quantized weights whenever something happens; between micro-batches by an operation that leaves a
    trace, and otherwise by ones that leave none."""

    def __init__(self):
        self.seen = set()
        for event in EVENTS:
            setattr(self, f"on_{event}", functools.partial(self._write, event))

    def _write(self, event, *state, model, **kwargs):
        self.seen.add(event)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "layers" in name:
                with torch.no_grad():
                    (parameter if event == "substep_end" else parameter.data).mul_(1.01)


def test_whatever_writes_weights_between_passes_is_seen(build, tmp_path):
    options = {"eval_dataset": prompts(1), "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    options |= {"save_strategy": "steps", "save_steps": 1}
    found = []
    for form in ("dense", "packed", "none"):
        writes = Writes()
        found.append(ended(train(build, tmp_path, form, callbacks=[writes], **options)))
        assert writes.seen == set(EVENTS)
    assert_same(found[0], found[2])
    assert_same(found[1], found[2])


def test_evaluation_quantizes_once_and_is_not_counted(build, tmp_path):
    found = []
    for form in ("dense", "none"):
        options = {"eval_dataset": prompts(3), "per_device_eval_batch_size": 4, "output_dir": str(tmp_path / form)}
        trainer = build(step_weights=form, **options)
        found.append(trainer.evaluate())
        assert trainer._metrics["train"]["quantization/weights_per_step"] == []
    values = [{k: v for k, v in metrics.items() if "time" not in k and "per_second" not in k} for metrics in found]
    assert values[0] == values[1]
    assert {"eval_loss", "eval_reward", "eval_entropy"} <= values[0].keys()
