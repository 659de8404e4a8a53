# SPDX-License-Identifier: Apache-2.0
"""Training, saving and resuming under the configurations of `recipes/accelerate`, on two CPU processes over gloo."""

import importlib.util
import json
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from cpu_engines import CONFIGS, run_job
from peft import PeftModel
from safetensors.torch import load_file
from same_bits import assert_same
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import why_incomplete


TINY = [
    "--study={sft_steps: 3, sft_batch_size: 8, tiny_hidden_size: 32, tiny_num_layers: 2}",
    "--per_device_train_batch_size=8", "--num_generations=4", "--max_steps=3",
    "--study={reload_check: 16, greedy_batch_size: 8}",
]  # fmt: skip
NO_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
TYPES = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


def large(engine, *values):
    """Parameters of a test that are tried in the long run alone."""
    marks = [pytest.mark.large, NO_DEEPSPEED] if engine.startswith("zero") else [pytest.mark.large]
    return pytest.param(engine, *values, marks=marks)


def case(engine, mode, *marks):
    marks = (*marks, NO_DEEPSPEED) if engine.startswith("zero") else marks
    return pytest.param((engine, mode), marks=marks, id=f"{engine}-{mode}")


#: Mixtures have linear layers and experts.
CASES = [case("fsdp2", "moe"), case("zero3", "moe")]
LONG = {"qat": ("ddp", "fsdp2", "zero2", "zero3"), "lora": ("ddp", "fsdp2", "zero3")}
LONG |= {"moe": ("ddp",), "moe_lora": ("ddp", "fsdp2")}
CASES += [case(engine, mode, pytest.mark.large) for mode in LONG for engine in LONG[mode]]


def base_of(root, mode):
    """The folder of the model that jobs of a mode start from."""
    return root / ("moe" if mode.startswith("moe") else "base")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """`run(engine, mode)` gives the folder and the results of a job, which is run once."""
    root = tmp_path_factory.mktemp("engines")
    done = {}

    def base(mode):
        folder = base_of(root, mode)
        if not folder.exists():
            moe = mode.startswith("moe")
            run_job("engine_jobs:make_base", root / "base.log", folder=str(folder), moe=moe)
        return folder

    def run(engine, mode, **options):
        key = (engine, mode, str(options))
        if key not in done:
            arguments = {"engine": engine, "mode": mode, "base": str(base(mode)), **options}
            out = folder_of("train_and_save", root, 1 if engine is None else 2, **arguments)
            done[key] = out, torch.load(out / "results.pt")
        return done[key]

    run.root = root
    run.base = base
    return run


@pytest.fixture(params=CASES)
def job(request, jobs):
    engine, mode = request.param
    return engine, mode, *jobs(engine, mode)


@pytest.fixture(params=[param for param in CASES if param.values[0][1].startswith("moe")])
def mixture(request, jobs):
    engine, mode = request.param
    return engine, mode, *jobs(engine, mode)


def folder_of(job, root, ranks, **arguments):
    """The folder that a job wrote; run once more where a process crashed, as PyTorch's gloo was seen to do once."""
    for _ in range(2):
        out = Path(tempfile.mkdtemp(dir=root))
        answer = run_job(f"engine_jobs:{job}", out / "log", ranks=ranks, out=str(out), **arguments)
        if -signal.SIGSEGV not in answer.codes:
            break
    assert answer.codes == [0] * ranks, answer.output[-4000:]
    return out


def alone_and_together(job, engine, root, **arguments):
    """The folders that a job wrote in one process, and in two under an engine."""
    alone = folder_of(job, root, 1, engine=None, **arguments)
    return alone, folder_of(job, root, 2, engine=engine, **arguments)


def weights_file(folder):
    return next(path for name in ("model", "adapter_model") for path in folder.glob(f"{name}.safetensors"))


def test_every_configuration_is_used_by_a_case():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {param.values[0][0] for param in CASES}


def test_losses_are_those_of_one_process(job, jobs):
    engine, mode, _, results = job
    _, alone = jobs(None, mode)
    assert results["plain"]["distributed_type"] == TYPES[engine]
    assert results["plain"]["processes"] == 2
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        found = [entry[name] for entry in results["plain"]["logs"]]
        expected = [entry[name] for entry in alone["plain"]["logs"]]
        assert len(found) == 4
        assert found == pytest.approx(expected, rel=tolerance)
    torch.testing.assert_close(results["plain"]["logits"], alone["plain"]["logits"], rtol=0, atol=1e-5)


def test_rollouts_get_the_noise_of_their_step_and_what_is_sharded_is_quantized_in_each_pass_too(job):
    engine, mode, _, results = job
    logs = results["grpo"]["logs"]
    sigmas = [entry["aqn/sigma"] for entry in logs]
    assert sigmas == pytest.approx([0, 1e-2, 10**-2.5, 1e-3])
    measured = [entry["aqn/measured_std"] for entry in logs]
    assert measured == pytest.approx(sigmas, rel=0.1)
    # Of a mixture of experts the norms before routers get none, and there are norms of queries and keys.
    norms = 7 if mode.startswith("moe") else 5
    assert all(entry["aqn/n_modules"] == norms for entry in logs[1:])
    first, second = results["grpo"]["noise"]
    assert first == second
    assert all(value > 0 for value in first)
    if not mode.endswith("lora"):
        times = (1 if engine in ("ddp", "zero2") else 3) * results["grpo"]["n_quantized"]
        assert [entry["quantization/weights_per_step"] for entry in logs] == [times] * 4


@pytest.mark.parametrize("kind", ["plain", "grpo"])
def test_saved_models_are_complete_and_trained_in_full_precision_and_compute_the_same(job, jobs, kind):
    _, mode, out, results = job
    alone, _ = jobs(None, mode)
    saved, expected = (load_file(weights_file(folder / kind / "saved")) for folder in (out, alone))
    assert {name: (t.shape, t.dtype) for name, t in saved.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }
    if kind == "plain":
        for name, weight in saved.items():
            # An input at the edge of two E4M3 numbers may be rounded to either, where sums have another order.
            difference = (weight - expected[name]).abs()
            assert difference.max() < 1e-4 and (difference > 2e-6).float().mean() < 0.02, name
    for folder in ("saved", "checkpoint-4"):
        found = _logits_of(out / kind / folder, mode, base_of(jobs.root, mode))
        assert (found - results[kind]["logits"]).norm() / found.norm() < 0.01


def _logits_of(folder, mode, base):
    from engine_jobs import logits

    if not mode.endswith("lora"):
        return logits(AutoModelForCausalLM.from_pretrained(folder))
    config = MXFP4RLConfig(mode="packed")
    packed = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    return logits(PeftModel.from_pretrained(packed, folder))


def test_a_resumed_run_repeats_the_one_that_was_not_stopped(job):
    _, _, out, results = job
    assert why_incomplete(out / "grpo" / "checkpoint-2") is None
    whole = load_file(weights_file(out / "grpo" / "saved"))
    assert_same(load_file(weights_file(out / "resumed" / "saved")), whole)

    def logs_of(kind):
        return [[entry[name] for name in ("step", "reward", "entropy", "aqn/sigma")] for entry in results[kind]["logs"]]

    assert logs_of("resumed") == logs_of("grpo")
    assert len(logs_of("grpo")) == 4


def test_mixtures_replay_and_measure_their_routing(mixture):
    _, mode, out, results = mixture
    logs = results["grpo"]["logs"]
    assert [entry["router_replay/coverage"] for entry in logs] == [1.0] * 4
    changed = [entry["router_replay/changed"] for entry in logs]
    # The first rollout has no noise, and the policy that trains on it is the one that sampled it. On packed weights
    # noise is all that changes between the two in the later steps, too.
    assert changed[0] == 0
    assert all(0 <= share < 0.5 for share in changed)
    assert mode == "moe_lora" or any(changed[1:])


def test_error_components_are_of_whole_weights(mixture, jobs):
    _, mode, _, results = mixture
    _, alone = jobs(None, mode)
    if mode == "moe_lora":  # there is nothing to compare packed weights with
        assert results["grpo"]["errors"] is None
        return
    errors = results["grpo"]["errors"]
    assert [entry["step"] for entry in errors] == [step for step in (0, 2, 4) for _ in range(4)]
    layers = [entry["layer"] for entry in errors[:4]]
    assert layers[0] == "model.layers.0.self_attn.q_proj"
    assert layers[-1] == "model.layers.1.mlp.experts.5.down_proj"
    assert errors[:4] == alone["grpo"]["errors"][:4]  # before the first step


def test_movement_of_quantized_weights_is_that_of_whole_weights(job, jobs):
    _, mode, _, results = job
    if mode.endswith("lora"):  # frozen weights do not move
        assert not any(results[kind]["movement"] for kind in ("plain", "grpo", "resumed"))
        return
    (found,) = results["plain"]["movement"]
    (expected,) = jobs(None, mode)[1]["plain"]["movement"]
    assert [entry["step"] for entry in found] == [1, 4]
    assert found[0].keys() == expected[0].keys()
    for kind in found[0].keys() - {"step"}:
        assert found[0][kind]["n_weights"] == expected[0][kind]["n_weights"]
        assert found[0][kind]["ratio"] == pytest.approx(expected[0][kind]["ratio"], abs=0.02)
    assert [entry["step"] for entry in results["grpo"]["movement"][0]] == [1, 2, 4]
    # A resumed run measures its first step too.
    (resumed,), (whole,) = (results[kind]["movement"] for kind in ("resumed", "grpo"))
    assert [entry["step"] for entry in resumed] == [3, 4]
    assert resumed[-1] == whole[-1]


def test_mixtures_are_saved_as_transformers_saves_them_and_checkpoints_have_whole_experts(mixture, jobs):
    engine, mode, out, _ = mixture
    if mode == "moe_lora":
        adapters = load_file(weights_file(out / "grpo" / "saved"))
        assert len(adapters) == 2 * 4 * 2
        assert all("self_attn" in name and t.numel() for name, t in adapters.items())
        return
    base = load_file(weights_file(base_of(jobs.root, mode)))
    saved = load_file(weights_file(out / "grpo" / "saved"))
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in base.items()}
    assert saved["model.layers.1.mlp.experts.5.down_proj.weight"].shape == (32, 32)
    trained = [name for name in saved if not torch.equal(saved[name], base[name])]
    assert sum(".experts." in name for name in trained) > 30  # of 36; an expert may see no token
    checkpoint = load_file(weights_file(out / "grpo" / "checkpoint-4"))
    assert checkpoint["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 64, 32)
    assert checkpoint["model.layers.1.mlp.experts.down_proj"].shape == (6, 32, 32)


ENGINES = pytest.mark.parametrize("engine", [large("ddp"), "fsdp2", large("zero3")])


@ENGINES
def test_rollouts_of_unequal_length_with_and_without_kept_copies(jobs, engine):
    out = folder_of("train_on_uneven_rollouts", jobs.root, 2, engine=engine, base=str(jobs.base("moe")))
    # Of queries, keys, values and outputs, and of six experts; float32.
    copies = 4 * 2 * (2 * 32 * 32 + 2 * 32 * 16 + 6 * 3 * 32 * 32)
    for rank in (0, 1):
        kept, none = json.loads((out / f"rank{rank}.json").read_text()).values()
        extra = [a - b for a, b in zip(kept["held"], none["held"], strict=True)]
        # The thread of a collective may still hold the few bytes it gathered; the smallest copy has 2048.
        assert extra == [pytest.approx(copies, abs=1024)]
        assert kept["logs"] == none["logs"]
        (log,) = kept["logs"]
        assert log["router_replay/coverage"] == log["completions/min_length"] == 1
        assert log["completions/max_length"] == 6


SHARDING = pytest.mark.parametrize("engine", ["fsdp2", large("zero3")])


def pushed(jobs, engine, packs):
    """What one process pushes, and what each of two ranks does."""
    folders = alone_and_together("push_to_vllm", engine, jobs.root, base=str(jobs.base("moe")), packs=packs)
    found = [torch.load(out / f"pushed{rank}.pt") for ranks, out in enumerate(folders, 1) for rank in range(ranks)]
    for rank in found[1:]:
        assert rank["unwritten"]
        assert [push.keys() for push in rank["pushes"]] == [p.keys() for p in found[0]["pushes"]]
        for name, weight in found[0]["pushes"][0].items():
            assert torch.equal(rank["pushes"][0][name], weight), name
    return found


@SHARDING
def test_vllm_gets_adapters_on_quantized_weights_from_sharded_masters(jobs, engine):
    """The weights that one process pushes, to the bit, on all ranks."""
    expected, *ranks = pushed(jobs, engine, packs=False)
    assert 0.009 < expected["noise"] < 0.011
    assert "model.layers.1.mlp.experts.down_proj" in expected["pushes"][0]
    assert [rank["noise"] for rank in ranks] == [pytest.approx(expected["noise"], rel=1e-6)] * 2


@pytest.mark.large
@SHARDING
def test_vllm_gets_codes_once_and_factors_from_sharded_masters(jobs, engine):
    first, second = pushed(jobs, engine, packs=True)[0]["pushes"]
    factors = {f"model.layers.{i}.self_attn.q_proj.lora_{side}.weight" for i in range(2) for side in "AB"}
    assert second.keys() == factors
    assert first["model.layers.1.mlp.experts.down_proj"].dtype == torch.uint8


@pytest.mark.large
@NO_DEEPSPEED
@pytest.mark.parametrize(
    ("engine", "mode"), [("zero2", "qat"), ("zero3", "qat"), ("fsdp2", "qat"), ("zero3", "moe"), ("fsdp2", "moe")]
)
def test_in_bfloat16_the_float32_masters_are_saved(jobs, engine, mode):
    out, results = jobs(engine, mode, mixed_precision="bf16")
    saved = load_file(weights_file(out / "plain" / "saved"))
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert all(not torch.equal(weight, weight.bfloat16().float()) for weight in saved.values())
    if mode == "moe":
        assert [log["router_replay/coverage"] for log in results["grpo"]["logs"]] == [1.0] * 4
        assert results["grpo"]["logs"][0]["router_replay/changed"] == 0


@pytest.mark.large
@pytest.mark.parametrize("mode", ["qat", "moe"])
def test_sharded_checkpoints_resume_and_the_model_is_saved_whole(jobs, mode):
    out, results = jobs("fsdp2", mode, fsdp={"fsdp_state_dict_type": "SHARDED_STATE_DICT"})
    assert not list((out / "grpo" / "checkpoint-4").glob("*.safetensors"))
    found = _logits_of(out / "grpo" / "saved", mode, None)
    torch.testing.assert_close(found, results["grpo"]["logits"], rtol=0, atol=1e-5)
    whole = load_file(weights_file(out / "grpo" / "saved"))
    assert_same(load_file(weights_file(out / "resumed" / "saved")), whole)


def test_tensor_parallel_loading_is_refused(jobs):
    answer = run_job("engine_jobs:load_split", jobs.root / "split.log", ranks=2, base=str(jobs.base("moe")))
    assert answer.codes == [0, 0], answer.output[-3000:]
    # One rank may load the plain model while the other is still refused.
    assert answer.output.count("refused: the layers of this package cannot be split over devices") == 4
    assert answer.output.count("recipes/accelerate") == 4
    before, _, after = answer.output.partition("the plain model")
    assert "Loading weights" not in before
    assert after.count("is loaded") == 2  # so that the refusals are ours


RECIPES = [large(engine, config) for config in ("tiny_cpu", "tiny_moe_cpu") for engine in ("fsdp2", "zero3")]
#: One process prepares weights while the other waits.
RECIPES += [large("fsdp2", "tiny_cpu_lora"), pytest.param("zero3", "tiny_cpu_lora", marks=NO_DEEPSPEED)]


@pytest.mark.parametrize(("engine", "config"), RECIPES)
def test_the_recipe_runs_from_start_to_reload(jobs, engine, config):
    # 17 problems in batches of 8 are two batches for one process and one for the other.
    options = ["--config", f"{CONFIGS.parent / 'configs' / config}.yaml", *TINY, "--evaluate_n=17"]
    out = folder_of("run_recipe", jobs.root, 2, engine=engine, options=options)
    summary = json.loads((out / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["reloaded"] == {"compared": 16, "identical": 16}


@pytest.mark.large
@NO_DEEPSPEED
def test_deepspeed_finishes_an_update_before_it_stops(jobs):
    """Its update is inside of the backward pass."""
    out = folder_of("stop_in_an_update", jobs.root, 1, engine="zero2", base=str(jobs.base("qat")))
    found = torch.load(out / "ends.pt")
    whole, stopped, resumed = found["ends"]
    assert found["saved"] == ["checkpoint-3"]
    assert any(not torch.equal(stopped[name], whole[name]) for name in whole)
    assert_same(resumed, whole)


@ENGINES
def test_distillation_is_that_of_one_process(jobs, engine):
    folders = alone_and_together("distill", engine, jobs.root, base=str(jobs.base("qat")))
    one, two = (json.loads((out / "distilled.json").read_text()) for out in folders)
    alone = one["whole"]
    both = two["whole"]
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert len(both["loss"]) == 4
    assert both["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)
    assert both["tokens"] == alone["tokens"] > 0
    assert alone["shared"] > 0
    assert bool(both["shared"]) == (engine == "ddp")
    assert two["resumed"] == both


@pytest.mark.parametrize(
    "engine, mode",
    [
        pytest.param("ddp", "qat", marks=pytest.mark.slow),
        *(large(*each) for each in (("fsdp2", "qat"), ("fsdp2", "lora"), ("zero3", "qat"))),
    ],
)
def test_trainers_of_trl_train_as_in_one_process(jobs, engine, mode):
    folders = alone_and_together("train_with_trl", engine, jobs.root, base=str(jobs.base(mode)), mode=mode)
    one, two = (json.loads((out / "trl.json").read_text()) for out in folders)
    for name, logs in one.items():
        assert two[name] == [pytest.approx(log, rel=1e-3, abs=1e-5) for log in logs]
        assert len(logs) == 2
        expected, found = (load_file(weights_file(out / name / "saved")) for out in folders)
        assert expected.keys() == found.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(found[key], weight, rtol=0, atol=2e-5)
