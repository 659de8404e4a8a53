# SPDX-License-Identifier: Apache-2.0
"""`model.generate()` keeps quantized weights while it runs, never longer, and never stale ones; logits of a prompt
depend on the prompt alone."""

import contextlib
import copy

import accelerate
import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig, cached_weights, uncached_weights
from hf_mxfp4.ops import gemm_states
from hf_mxfp4.presets import PRESETS


dense = pytest.mark.usefixtures("dense_products")

IDS = torch.arange(2, 8)[None]
TOKENS = 5
LINEARS = 14


def load(checkpoint, family="qwen2", **options):
    config = MXFP4RLConfig(**options)
    return AutoModelForCausalLM.from_pretrained(checkpoint(family), quantization_config=config).eval()


def generate(model, **options):
    return model.generate(input_ids=IDS, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, **options)


def logits(model):
    return torch.stack(generate(model, output_logits=True, return_dict_in_generate=True).logits)


def nothing_is_open(model):
    return all(state.cache is None for state in gemm_states(model))


@dense
def test_each_weight_is_quantized_once_per_call(checkpoint, count):
    model = load(checkpoint)
    count()
    with uncached_weights(model):
        expected = logits(model)
    assert count() == LINEARS * TOKENS  # what it costs without
    for _ in range(2):
        assert torch.equal(logits(model), expected)
        assert count() == LINEARS
        assert nothing_is_open(model)
    with cached_weights(model):
        assert torch.equal(logits(model), expected)
        assert torch.equal(logits(model), expected)
    assert count() == LINEARS


@dense
@pytest.mark.parametrize("context", [cached_weights, lambda _: contextlib.nullcontext()], ids=["cached", "plain"])
def test_a_change_between_two_calls_is_seen(context, checkpoint):
    model = load(checkpoint)
    with context(model):
        old = logits(model)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)
    new = logits(model)
    with uncached_weights(model):
        assert torch.equal(logits(model), new)
    assert not torch.equal(new, old)


@dense
def test_copies_of_a_model_generate_with_their_own_weights(checkpoint, count):
    model = load(checkpoint)
    expected = logits(model)
    other = copy.deepcopy(model)
    torch.testing.assert_close(logits(other), expected)  # a mapped file is aligned otherwise: an ulp on some CPUs
    other.model.layers[1].mlp.up_proj.weight.data.neg_()
    count()
    assert not torch.allclose(logits(other), expected)
    assert count() == LINEARS
    assert torch.equal(logits(model), expected)


@dense
def test_the_call_ends_with_an_exception(checkpoint):
    model = load(checkpoint)

    def fail(ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, logits_processor=[fail])
    assert nothing_is_open(model)
    old = logits(model)
    model.model.layers[0].mlp.down_proj.weight.data.neg_()
    assert not torch.equal(logits(model), old)


@dense
def test_models_that_are_offloaded_keep_no_copies(checkpoint, count):
    """Their weights come to the device one layer at a time, since they do not fit there together."""
    model = load(checkpoint)
    expected = generate(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    count()
    assert torch.equal(generate(model), expected)
    assert count() == LINEARS * TOKENS


#: Where sums are added up in another order, an activation at the edge of two values of the grid may get the other one.
ROUNDING = 0.01
SIZES = {"hidden": 128, "intermediate": 256}
FALLBACK = {"mode": "packed", "preset": "w4a4", "outlier_fallback": 1.0}
SCHEMES = {
    **{preset: {"preset": preset} for preset in PRESETS if preset not in ("w4a8g8", "w4a4g4")},
    **{f"packed {preset}": {"mode": "packed", "preset": preset} for preset in ("w4a16", "w4a8", "w4a4")},
    "packed fallback and rotation": {**FALLBACK, "fprop": {"rotation": "deterministic-64"}},
}
PROMPT = torch.randint(2, 32, (1, 9), generator=torch.Generator().manual_seed(1))
OTHER = torch.full((1, 9), 7)


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def difference(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def check(model, folder):
    expected = logits_of(model, PROMPT)
    assert torch.equal(logits_of(model, PROMPT), expected), "asked again"
    logits_of(model, OTHER)
    assert torch.equal(logits_of(model, PROMPT), expected), "after another prompt"
    assert difference(logits_of(model, torch.cat([OTHER, PROMPT]))[1:], expected) < ROUNDING, "in a batch"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert difference(logits_of(model, PROMPT), expected) < ROUNDING, "with two threads"
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits_of(loaded, OTHER)
    assert torch.equal(logits_of(loaded, PROMPT), expected), "saved and loaded, after another prompt"
    return expected


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of a decoder and of a mixture of experts, with weights whose quantization is seen."""
    folders = {}
    for family, options in (("qwen2", {}), ("qwen3_moe", {"moe_intermediate_size": 128})):
        model = make_model(family, **SIZES, **options)
        for parameter in model.parameters():
            parameter.data *= 4 if parameter.dim() > 1 else 1
        folders[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(folders[family])
    return folders


#: Of experts too.
MIXED = ("w4a4", "paper_b", "packed w4a8", "packed fallback and rotation")


@pytest.mark.parametrize(
    ("scheme", "family"), [(scheme, "qwen3_moe" if scheme in MIXED else "qwen2") for scheme in SCHEMES]
)
def test_logits_of_a_prompt(sources, tmp_path, scheme, family):
    config = MXFP4RLConfig(**SCHEMES[scheme])
    model = AutoModelForCausalLM.from_pretrained(sources[family], dtype=torch.float32, quantization_config=config)
    expected = check(model.eval(), tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(sources[family], dtype=torch.float32)
    assert difference(logits_of(plain.eval(), PROMPT), expected) > 0.001  # something is quantized
