# SPDX-License-Identifier: Apache-2.0
"""Compiled decoding steps of `generate` skip guards after two steps that passed them, only where guards cannot fail."""

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import make_model
from torch._C._dynamo.eval_frame import set_guard_complete_hook
from torch._dynamo import eval_frame
from transformers import AutoModelForCausalLM, CompileConfig, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_mxfp4 import MXFP4RLConfig, pack
from hf_mxfp4.integrations import decoding_guards
from hf_mxfp4.integrations.decoding_guards import compiled_step, skipped_guards


IDS = torch.arange(2, 8)[None]
#: The first token is the prefill's. The first step compiles, the second and the third pass all guards.
TOKENS = 8
SKIPPED = [False, False, False, True, True, True, True]


class Compiler:
    """A compiler that runs graphs as they are.

    Attributes:
        skips: whether guards were skipped, for each run of compiled code.
        n_graphs: how many graphs it was given.
    """

    def __init__(self):
        self.skips = []
        self.n_graphs = 0

    def __deepcopy__(self, memo):  # CompileConfig.to_dict copies
        return self

    def __call__(self, graph, inputs):
        self.n_graphs += 1

        def run(*arguments):
            self.skips.append(eval_frame._stance.skip_guard_eval_unsafe)
            return graph(*arguments)

        return run


class FailsAt(list):
    """A list that takes so many items."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def append(self, item):
        super().append(item)
        if len(self) == self.most:
            raise ZeroDivisionError


@pytest.fixture
def compiler():
    yield Compiler()
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def only_thread(monkeypatch):
    """Whatever runs the tests has no other threads."""
    here = threading.get_ident()
    frames = sys._current_frames
    monkeypatch.setattr(decoding_guards.sys, "_current_frames", lambda: {here: frames()[here]})


def packed_model(family="qwen2", **options):
    return pack(make_model(family, layers=1, **options), MXFP4RLConfig(mode="packed"))


def generate(model, compiler, ids=IDS, tokens=TOKENS, **options):
    config = CompileConfig(backend=compiler, mode=None)
    config._compile_all_devices = True  # as on a GPU
    options = {"cache_implementation": "static", "compile_config": config, "do_sample": False} | options
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)


def step(**inputs):
    """A compiled step."""


def skips_guards(model, options):
    """Return whether `generate` with such options may skip guards."""
    with skipped_guards(model, (), options):
        return compiled_step(step) is not step


def eager(model, ids=IDS):
    return model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)


def test_steps_after_the_warm_up_skip_guards_and_give_the_same_tokens(compiler):
    model = packed_model()
    assert torch.equal(generate(model, compiler), eager(model))
    assert compiler.skips == SKIPPED
    assert compiler.n_graphs == 1


def test_steps_of_a_trainable_model(compiler, checkpoint):
    folder = checkpoint(layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4RLConfig(), dtype=torch.float32)
    assert torch.equal(generate(model, compiler), eager(model))
    assert compiler.skips == SKIPPED


def test_each_call_warms_up_again(compiler):
    model = packed_model()
    generate(model, compiler)
    compiler.skips.clear()
    generate(model, compiler)
    assert compiler.skips == SKIPPED[1:] + [True]


def test_another_batch_size_is_compiled_again(compiler):
    model = packed_model()
    generate(model, compiler)
    batch = torch.cat([IDS, IDS.flip(1)])
    assert torch.equal(generate(model, compiler, batch), eager(model, batch))
    assert compiler.n_graphs == 2
    assert torch.equal(generate(model, compiler), eager(model))


def test_another_model_has_its_own_tokens(compiler):
    first = packed_model(seed=0)
    second = packed_model(seed=1)
    expected = [eager(first), eager(second)]
    assert not torch.equal(*expected)
    for _ in range(2):
        assert torch.equal(generate(first, compiler), expected[0])
        assert torch.equal(generate(second, compiler), expected[1])


def test_an_adapter_between_two_calls_is_seen(compiler):
    from peft import LoraConfig, get_peft_model

    model = packed_model()
    generate(model, compiler)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    assert torch.equal(generate(adapted, compiler), eager(adapted))


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": [lambda ids, scores: scores]},
        {"stopping_criteria": [lambda ids, scores: False]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [0]},
        {"assistant_model": torch.nn.Identity()},
        {"custom_generate": lambda model: None},
        {"streamer": BaseStreamer()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_guards_stay_where_code_of_the_user_runs_between_steps(options):
    """It could run compiled code, or change the model."""
    model = packed_model()
    assert not skips_guards(model, options)
    assert skips_guards(model, {"logits_processor": [], "streamer": TextStreamer(None)})


def test_guards_stay_where_a_processor_is_given_by_position():
    with skipped_guards(packed_model(), (IDS, None, [lambda ids, scores: scores]), {}):
        assert compiled_step(step) is step


def test_guards_stay_for_a_cache_that_counts_in_python(compiler):
    """Its compiled code changes when the window is full."""
    options = {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
    model = packed_model(**options)
    assert torch.equal(generate(model, compiler), eager(model))
    assert not any(compiler.skips)


def test_guards_stay_for_hooks():
    """They could count calls, and change what they do."""
    model = packed_model()
    handle = model.model.norm.register_forward_hook(lambda module, inputs, output: None)
    assert not skips_guards(model, {})
    handle.remove()
    assert skips_guards(model, {})


def test_guards_stay_for_models_of_others():
    class Model(type(packed_model())):
        pass

    model = packed_model()
    model.__class__ = Model
    assert not skips_guards(model, {})


def test_guards_stay_for_code_that_is_compiled_too_often(compiler):
    model = packed_model()
    generate(model, compiler)
    compiler.skips.clear()
    batch = torch.cat([IDS, IDS.flip(1)])
    with torch._dynamo.config.patch(recompile_limit=1):
        assert torch.equal(generate(model, compiler, batch), eager(model, batch))
    assert compiler.skips == []  # it ran uncompiled


def test_guards_stay_for_graphs_that_break(compiler):
    model = packed_model()
    forward = type(model.model.norm).forward

    def broken(self, x):
        torch._dynamo.graph_break()
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model.norm), "forward", broken)
        assert torch.equal(generate(model, compiler), eager(model))
    assert compiler.skips
    assert not any(compiler.skips)


def test_guards_stay_under_a_stance_of_the_user():
    model = packed_model()
    with torch.compiler.set_stance("force_eager"):
        assert not skips_guards(model, {})


def test_guards_stay_for_plain_models(compiler):
    packed_model()  # which changes the class
    generate(make_model(layers=1), compiler)
    assert not any(compiler.skips)


def test_guards_stay_outside_of_generate():
    config = CompileConfig(backend="eager", mode=None)
    assert packed_model().get_compiled_call(config).__name__ != "run"


def test_guards_stay_while_another_thread_runs(compiler, monkeypatch):
    monkeypatch.undo()
    stop = threading.Event()
    thread = threading.Thread(target=lambda: stop.wait())
    thread.start()
    try:
        generate(packed_model(), compiler)
    finally:
        stop.set()
        thread.join()
    assert not any(compiler.skips)


def test_idle_workers_and_timers_are_told_apart(monkeypatch):
    monkeypatch.undo()
    frames = sys._current_frames
    known = set(frames()) - {threading.get_ident()}
    own = lambda: {thread: frame for thread, frame in frames().items() if thread not in known}  # noqa: E731
    monkeypatch.setattr(decoding_guards.sys, "_current_frames", own)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert decoding_guards._other_threads_wait()
        assert pool.submit(decoding_guards._other_threads_wait).result() is False  # this test runs
    timer = threading.Timer(60, int)
    timer.start()
    has_no_timer = decoding_guards._other_threads_wait()
    timer.cancel()
    timer.join()
    assert not has_no_timer


def test_an_error_restores_the_stance(compiler):
    model = packed_model()
    compiler.skips = FailsAt(5)
    with pytest.raises(ZeroDivisionError):
        generate(model, compiler)
    assert compiler.skips == SKIPPED[:5]
    assert eval_frame._stance == eval_frame.DynamoStance()
    assert set_guard_complete_hook(None) is None
    assert torch.equal(generate(model, Compiler()), eager(model))


def test_guards_stay_where_torch_has_no_such_stance(monkeypatch):
    def set_stance(stance="default", *, force_backend=None):
        raise AssertionError

    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
    assert not skips_guards(packed_model(), {})


def test_the_log_counts_steps(compiler, caplog):
    logger = logging.getLogger("hf_mxfp4")
    logger.addHandler(caplog.handler)
    with caplog.at_level("DEBUG", "hf_mxfp4"):
        generate(packed_model(), compiler)
    logger.removeHandler(caplog.handler)
    assert "4 of 7 compiled steps skipped guards" in caplog.text
