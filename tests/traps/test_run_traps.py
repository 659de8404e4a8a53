# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other projects made in runs, evaluations and records: B13 to B15, B25 to B28, B30 to B33, and B35 as
far as it applies, one test or more named after each."""

import itertools
import json
import multiprocessing
import threading
from pathlib import Path

import pytest
import torch
import yaml
from grpo_runs import even_digits, logged, prompts
from peft import LoraConfig
from same_bits import assert_same, weights
from tiny_models import make_model

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.rl import EntropyCallback, NormNoise
from recipes.grpo import main
from recipes.post_training.arguments import parse
from recipes.post_training.output import resolved_options, run_id
from recipes.tasks import load_task


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
TINY = """--sft_steps=3 --sft_batch_size=8 --tiny_hidden_size=32 --tiny_num_layers=2 --per_device_train_batch_size=8
--num_generations=4 --max_steps=3 --logging_steps=2 --aqn_num_stages=3 --reload_check=0 --greedy_batch_size=8
--n_test=16 --seed=5 --report_every=0""".split()


@pytest.fixture(scope="module")
def recipe_run(tmp_path_factory):
    """The folder and the summary of a short run of the recipe, whose steps no cadence divides."""
    folder = tmp_path_factory.mktemp("recipe") / "out"
    return folder, main([*TINY, "--macro_block=64", f"--output_dir={folder}"])


# ---- B13: groups without variance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_b13_a_constant_reward_trains_to_the_end_logs_its_share_and_changes_nothing(run, value):
    trainer = run(lambda completions, **kwargs: [value] * len(completions), max_steps=2)
    before = weights(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 2
    assert logged(trainer, "frac_reward_zero_std") == {1: 1.0, 2: 1.0}
    assert_same(weights(trainer.model), before)


# ---- B14, B25, B26: evaluations that are missing, or of other weights -----------------------------------------------


def test_b14_b25_evaluations_come_at_their_cadence_and_after_the_last_step_beside_sigma(run):
    rows = prompts(4)
    trainer = run(eval_dataset=rows, max_steps=5, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)
    trainer.train()
    evaluated, sigma = logged(trainer, "eval_reward"), logged(trainer, "aqn/sigma")
    assert list(evaluated) == [2, 4, 5]
    assert evaluated.keys() <= sigma.keys() and any(sigma[step] > 0 for step in evaluated)


def test_b25_the_record_of_a_run_is_of_its_last_step_and_says_of_what(recipe_run):
    folder, summary = recipe_run
    assert summary["steps"] == 3 and summary["seed"] == 5 and summary["n_test"] == 16
    assert summary["scheme"] == MXFP4RLConfig(macro_block=64).describe() and summary["n_quantized"] == 14
    assert summary["aqn_sigma_logged"]["largest"] > 0
    for when in ("before", "after"):
        assert set(summary[f"accuracy_{when}"]) == set(summary[f"standard_error_{when}"]) == {"exact_match"}
    assert len((folder / "completions_after.jsonl").read_text().splitlines()) == 16


class Engine:
    """TRL's interface to vLLM, holding the weights that were pushed last."""

    def __init__(self, trainer):
        self.trainer, self.held, self.sampled_with = trainer, None, []

    def _iter_named_params(self):
        yield from self.trainer.model.named_parameters()

    def sync_weights(self):
        self.held = dict(self._iter_named_params())

    def generate(self, prompts, **kwargs):
        self.sampled_with.append(self.held)
        return None, [[2, 1]] * len(prompts), [[[0.0], [0.0]]] * len(prompts), None


def vllm_trainer(run, **options):
    trainer = run(**options)
    trainer.use_vllm = trainer.args.use_vllm = True
    trainer.vllm_generation, trainer._last_loaded_step = Engine(trainer), -1
    trainer._push_rollout_policy_to_vllm()
    trainer.state.max_steps = 4
    return trainer


def test_b26_an_evaluation_alone_samples_from_weights_that_were_pushed(run):
    """There is no copy of a checkpoint to sync here: weights go to vLLM before it generates. See B28 for counts."""
    trainer = vllm_trainer(run)
    trainer.model.eval()
    trainer._generate(["1+1="])
    (held,) = trainer.vllm_generation.sampled_with
    layer = trainer.model.model.layers[0].mlp.up_proj
    assert torch.equal(held["model.layers.0.mlp.up_proj.weight"], layer.quantized_weight(layer.weight, torch.float32))
    assert torch.equal(held["model.norm.weight"], trainer.model.model.norm.weight)


def test_b26_b29_an_evaluation_after_a_noisy_rollout_of_the_same_step_samples_from_clean_weights(run):
    trainer = vllm_trainer(run, aqn_num_stages=1, aqn_sigma_start=0.1, aqn_sigma_end=0.1)
    for training in (True, False):
        trainer.model.train(training)
        trainer._generate(["1+1="])
    noisy, clean = (held["model.norm.weight"] for held in trainer.vllm_generation.sampled_with)
    assert not torch.equal(noisy, clean) and torch.equal(clean, trainer.model.model.norm.weight)


# ---- B15, B30, B31: recipes and records -----------------------------------------------------------------------------

#: Options that say where a run is written and what is watched, not what is trained.
WATCHING = {"output_dir", "error_every", "router_every", "logging_steps"}
#: What else shipped configurations of one family may differ in; nothing more, resolved defaults included.
PAIRS = {
    ("tiny_cpu", "tiny_cpu_lora"): {
        "mode", "preset", "outlier_fallback", "learning_rate", "use_peft", "lora_dropout", "lora_target_modules",
    },
    ("tiny_cpu", "tiny_moe_cpu"): {
        "tiny_architecture", "per_device_train_batch_size", "generation_batch_size", "router_replay",
    },
}  # fmt: skip


def resolved(*words):
    return resolved_options(*parse([*words, "--use_cpu=true", "--bf16=false"]))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_b15_configurations_that_are_compared_differ_in_declared_options_alone(pair):
    one, other = (resolved("--config", str(CONFIGS / f"{name}.yaml")) for name in pair)
    assert {name for name in one if one[name] != other[name]} - WATCHING == PAIRS[pair]


def test_b15_switching_noise_off_moves_no_other_option():
    """Elsewhere a filter went off with it, and a step had twice the prompts."""
    one, other = resolved("--aqn=true"), resolved("--aqn=false")
    assert {name for name in one if one[name] != other[name]} == {"aqn"}


def test_b30_results_are_not_written_over(recipe_run):
    folder, _ = recipe_run
    before = (folder / "summary.json").read_bytes()
    with pytest.raises(SystemExit, match="is not empty"):
        main([*TINY, f"--output_dir={folder}"])
    assert (folder / "summary.json").read_bytes() == before


def test_b30_runs_have_one_id_when_they_compute_the_same(tmp_path):
    base = resolved()
    assert run_id(base) == run_id(resolved(f"--output_dir={tmp_path}"))
    others = [resolved(word) for word in ("--seed=1", "--aqn_sigma_start=0.05", "--macro_block=none", "--sft_steps=1")]
    assert len({run_id(options) for options in (base, *others)}) == 5


def test_b31_a_run_writes_down_every_option_that_it_used(recipe_run):
    folder, _ = recipe_run
    options = yaml.safe_load((folder / "resolved_config.yaml").read_text())["options"]
    given = {"seed": 5, "macro_block": 64, "aqn_num_stages": 3, "max_steps": 3, "tiny_hidden_size": 32}
    assert given.items() <= options.items()  # from the command line
    assert options["task"] == "arithmetic" and options["learning_rate"] == 1e-4  # from the file
    assert options["aqn"] is True and options["rollout_correction"] is True  # by default
    assert options["max_completion_length"] == 4 and not any(name.endswith("token") for name in options)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONFIGS.glob("*.yaml")) if not path.stem.startswith(("pretrain", "ablation"))],
    ids=lambda path: path.stem,
)
def test_b31_every_line_of_a_recipe_arrives(path):
    """A shell script loses its options at a backslash that is missing; a file of options cannot."""
    options = resolved("--config", str(path))
    for name, value in yaml.safe_load(path.read_text()).items():
        if name not in ("use_cpu", "bf16", "report_to"):
            assert str(options[name]) == str(value), name


# ---- B27: scores of the format and not of the policy ----------------------------------------------------------------

GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether she sold 72.\n#### 72"


def test_b27_a_golden_answer_earns_the_reward_and_the_format_is_scored_apart(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).write_text(json.dumps({"question": "How many?", "answer": GOLD}))
    task = load_task("gsm8k", train_file=str(tmp_path / "train"), test_file=str(tmp_path / "test"))
    row = task.test[0]
    (reward,) = task.reward_funcs
    golden, free, wrong = row["completion"], "She sold 72 clips.", "#### 71"
    assert reward(prompts=[""] * 3, completions=[golden, free, wrong], answer=[row["answer"]] * 3) == [1.0, 0.0, 0.0]
    verdicts = {
        name: [score(text, row["answer"]) for text in (golden, free, wrong)] for name, score in task.scores.items()
    }
    assert verdicts == {"strict": [True, False, False], "flexible": [True, True, False]}


def test_b27_accuracy_before_training_is_reported(recipe_run):
    _, summary = recipe_run
    assert 0 <= summary["accuracy_before"]["exact_match"] <= 1


# ---- B28: patches that no worker saw --------------------------------------------------------------------------------


def test_b28_what_touched_nothing_is_an_error_and_not_a_result(run, monkeypatch):
    """Here the counts come from where the work is done: layers that ran, norms that ran, weights that were pushed."""
    with pytest.raises(ValueError, match="matches no layer"):
        quantize_linears(torch.nn.Sequential(torch.nn.ReLU()), MXFP4RLConfig())
    with pytest.raises(ValueError, match="would train in full precision"):
        run(policy=make_model(layers=1, hidden=32, intermediate=48))
    noise = NormNoise(make_model(), seed=0)
    with pytest.raises(RuntimeError, match="reached none of 5 norms"), noise.active(0, 0.1):
        make_model()(torch.tensor([[2, 3]]))  # another copy of the model, as in another process
    monkeypatch.setattr(Engine, "sync_weights", lambda self: None)
    trainer = vllm_trainer(run, aqn_num_stages=1)
    trainer.model.train()
    with pytest.raises(RuntimeError, match="pushed none of the weights of the policy to vLLM"):
        trainer._generate(["1+1="])


# ---- B32: a reference of another scheme -----------------------------------------------------------------------------


def test_b32_the_reference_policy_shares_the_scheme(run):
    scheme = MXFP4RLConfig(scale_rule="even", outlier_fallback=None)
    trainer = run(scheme=scheme, beta=0.1, max_steps=1, aqn=False)
    found = [module.config for module in trainer.ref_model.modules() if isinstance(module, MXFP4Linear)]
    assert found == [scheme] * 14
    trainer.train()
    assert abs(logged(trainer, "kl")[1]) < 1e-6  # policy and reference are one until the first update


def test_b32_the_base_of_adapters_is_the_reference(run):
    trainer = run(beta=0.1, max_steps=1, aqn=False, peft_config=LoraConfig(target_modules="all-linear", r=2))
    assert trainer.ref_model is None
    trainer.train()
    assert abs(logged(trainer, "kl")[1]) < 1e-6


# ---- B33: collapse and reward hacking that nobody watches -----------------------------------------------------------


def test_b33_entropy_and_length_are_logged_each_step_and_a_collapse_raises_the_alarm(run):
    trainer = run(temperature=0.05, max_steps=3)  # entropy is that of the sampling distribution
    trainer.train()
    for key in ("entropy", "entropy/slope", "completions/mean_length", "completions/clipped_ratio"):
        assert list(logged(trainer, key)) == [1, 2, 3]
    callback = EntropyCallback(collapse=0.05)
    for step, entropy in enumerate([0.27, 0.2, 0.04, 0.03, 0.2], start=1):
        state = type("State", (), {"global_step": step, "log_history": [{}]})
        logs = {"entropy": entropy}
        callback.on_log(trainer.args, state, None, logs=logs)
        assert logs["entropy/alarm"] == (-1 if entropy < 0.05 else 0)
    assert callback.alarms == [(3, "collapse", 0.04)]


# ---- B35: runs that do not end --------------------------------------------------------------------------------------


def test_b35_a_run_without_a_tracker_ends_and_leaves_nothing_running(run):
    before = set(threading.enumerate())
    trainer = run(even_digits, max_steps=1, report_to="none", logging_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 1
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]


# ---- the list -------------------------------------------------------------------------------------------------------


def test_every_trap_has_a_test_of_its_name():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    names = itertools.chain.from_iterable(
        line.split("(")[0].split("_") for line in text.splitlines() if line.startswith("def test_b")
    )
    found = {part for part in names if part[0] == "b" and part[1:].isdigit()}
    assert {f"b{number:02d}" for number in range(1, 35)} <= found
