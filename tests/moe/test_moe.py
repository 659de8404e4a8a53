# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures of experts: found, recorded in `generate`, replayed."""

import pytest
import torch
from moe_models import FAMILIES, make_moe, tokens
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn

from hf_mxfp4.model import routers
from hf_mxfp4.model.routers import ChoiceRecorder, RouterReplayError, find_routers, recorded_choices, replayed_choices


PLACES = {"gpt_oss": "mlp.router", "granitemoe": "block_sparse_moe.router"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_router_is_found_and_its_choices_are_read(family):
    model = make_moe(family)
    routers = find_routers(model)
    layers = [1] if family == "deepseek_v3" else [0, 1]  # whose first layer is dense
    assert list(routers) == [f"model.layers.{layer}.{PLACES.get(family, 'mlp.gate')}" for layer in layers]
    logits = []
    for router in routers.values():
        router.register_forward_hook(lambda module, args, output: logits.append(max(output, key=lambda t: t.shape[-1])))
    with torch.no_grad(), recorded_choices(routers) as choices:
        model(tokens())
    for (name, (chosen,)), scores in zip(choices.items(), logits, strict=True):
        assert chosen.shape == (21, 2) and scores.shape == (21, 6), name
        if family != "deepseek_v3":  # the best of all, where there are no groups
            assert torch.equal(chosen.sort().values, scores.argsort(descending=True)[:, :2].sort().values)


def test_without_a_router():
    model = make_model("qwen2")
    assert routers.present_routers(model) == {}
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no router.*mixture-of-experts models"):
        find_routers(model)


def test_a_router_of_another_library_is_found_by_structure():
    class Gate(nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.top_k = 2
            self.num_experts = 4
            self.weight = nn.Parameter(torch.zeros(experts, 8))

    # The second lacks a row for each expert, the third top_k.
    modules = nn.ModuleDict({"a": Gate(4), "b": Gate(5), "c": nn.Linear(8, 4)})
    assert list(find_routers(modules)) == ["a"]


def test_of_a_router_trained_as_a_copy_the_copy_is_taken():
    options = {"target_modules": ["q_proj"], "modules_to_save": ["gate"], "r": 2}
    model = get_peft_model(make_moe(), LoraConfig(**options))
    routers = find_routers(model)
    assert len(routers) == 2
    assert all(name.endswith(".mlp.gate.modules_to_save.default") for name in routers)
    with torch.no_grad(), recorded_choices(routers) as choices:
        model(tokens())
    assert [len(passes) for passes in choices.values()] == [1, 1]


def test_a_router_that_does_not_tell_its_choices_is_named():
    model = make_moe()
    router = model.model.layers[1].mlp.gate
    forward = router.forward
    router.forward = lambda x: (*forward(x)[:2], forward(x)[2].float())
    message = r"layers.1.mlp.gate \(Qwen3MoeTopKRouter\) does not return the indices"
    with torch.no_grad(), recorded_choices(find_routers(model)), pytest.raises(ValueError, match=message):
        model(tokens())


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [3]]


def generate(model, prompts=PROMPTS, *, new=4, **options):
    """Completions of left-padded prompts, each cut after its first end token (1)."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    torch.manual_seed(0)
    mask = (ids != 0).long()
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=True, pad_token_id=0, **options)
    rows = out[:, width:].tolist()
    return [row[: row.index(1) + 1] if 1 in row else row for row in rows]


def free_choices(model, ids=None):
    """The choices for sequences without padding or cache: ``[batch, length, layers, k]``."""
    ids = tokens() if ids is None else ids
    with torch.no_grad(), recorded_choices(find_routers(model)) as choices:
        model(ids)
    return torch.stack([passes[0].view(*ids.shape, 2) for passes in choices.values()], dim=2)


def record(model, routers=None, **options):
    """A recorder that has recorded the choices for completions of the prompts, and these."""
    recorder = ChoiceRecorder(model, routers or find_routers(model))
    with recorder.recording():
        return recorder, generate(model, **options)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_each_sequence_gets_its_own_choices(family):
    model = make_moe(family)
    recorder, completions = record(model)
    rows = recorder.rows(PROMPTS, completions)
    for prompt, completion, row in zip(PROMPTS, completions, rows, strict=True):
        (alone,) = free_choices(model, torch.tensor([[*prompt, *completion]]))
        assert row.dtype == torch.int16
        assert len(row) == len(prompt) + len(completion) - 1
        assert torch.equal(row.sort().values, alone[:-1].sort().values.to(torch.int16))


def test_sequences_that_ended_early():
    recorder, full = record(make_moe(), new=6, suppress_tokens=[1])
    ended = [full[0][:2], full[1], full[2][:5]]  # as if they had ended there
    assert [len(row) for row in recorder.rows(PROMPTS, ended)] == [3 + 1, 5 + 5, 1 + 4]


def test_generation_without_a_cache_is_refused():
    recorder, completions = record(make_moe(), use_cache=False)
    with pytest.raises(ValueError, match="key-value cache.*set use_cache=True"):
        recorder.rows(PROMPTS, completions)


def test_a_recorder_that_saw_no_pass_is_refused():
    recorder, completions = record(make_moe())
    with recorder.recording():
        pass
    with pytest.raises(ValueError, match="key-value cache"):
        recorder.rows(PROMPTS, completions)


def test_completions_that_were_not_recorded_are_refused():
    recorder, completions = record(make_moe())
    wrong = [completions[0], [completions[1][0] ^ 2, *completions[1][1:]], completions[2]]
    with pytest.raises(ValueError, match="sequence 1 came back with 5 . 4 tokens that are not the"):
        recorder.rows(PROMPTS, wrong)
    with pytest.raises(ValueError, match="recorded 3 sequences but 2 came back"):
        recorder.rows(PROMPTS[:2], completions[:2])


def test_generation_past_the_routers_is_refused():
    model = make_moe()
    routers = dict(find_routers(model))
    routers["elsewhere"] = make_moe().model.layers[0].mlp.gate
    recorder, completions = record(model, routers)
    with pytest.raises(ValueError, match="elsewhere routed 0 tokens in 0 passes while the model read"):
        recorder.rows(PROMPTS, completions)


ALL = torch.ones(3, 7, dtype=torch.bool)


def other_choices(model, seed=1):
    """Two distinct experts of six for each token and layer, at random: ``[3, 7, layers, 2]``."""
    shape = (3, 7, len(find_routers(model)), 6)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).argsort()[..., :2]


def weights_of(family, logits, chosen):
    """Independent of the models: what each architecture makes of the chosen logits."""
    if family == "deepseek_v3":
        picked = logits.sigmoid().gather(1, chosen)
        return picked / picked.sum(1, keepdim=True) * 2.5
    if family in ("gpt_oss", "granitemoe"):
        return logits.gather(1, chosen).softmax(1)
    picked = logits.softmax(1).gather(1, chosen)
    return picked if family in ("qwen2_moe", "olmoe") else picked / picked.sum(1, keepdim=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_experts_are_chosen_with_the_weights_of_the_architecture(family):
    model = make_moe(family)
    routers = find_routers(model)
    wanted = other_choices(model)
    assert not torch.equal(free_choices(model).sort().values, wanted.sort().values)
    outputs = []
    for router in routers.values():
        router.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad(), replayed_choices(routers, wanted, ALL) as report:
        model(tokens())
    assert len(outputs) == len(routers)
    for layer, output in enumerate(outputs):
        logits = next(t for t in output if t.shape[-1] == 6)
        weights, chosen = (next(t for t in output if t.shape[-1] == 2 and t.is_floating_point() == f) for f in (1, 0))
        assert torch.equal(chosen, wanted[:, :, layer].flatten(0, 1))
        torch.testing.assert_close(weights, weights_of(family, logits, chosen))
    assert report.coverage == 1
    assert report.tokens == 21
    assert 0 < report.changed < 1


class FixedRouter(nn.Module):
    """A router by itself: chooses what it is told, whatever the logits, and weighs it as ``family`` does."""

    def __init__(self, family, router, chosen):
        super().__init__()
        self.family = family
        self.weight = router.weight
        self.bias = getattr(router, "bias", None)
        self.chosen = chosen

    def forward(self, x):
        logits = nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return logits, weights_of(self.family, logits, self.chosen), self.chosen


def loss_of(model):
    ids = tokens()
    return nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"])
def test_gradients_are_those_of_a_model_that_has_no_choice(family):
    model = make_moe(family)
    reference = make_moe(family)
    wanted = other_choices(model)
    with replayed_choices(find_routers(model), wanted, ALL):
        loss_of(model).backward()
    for layer, (name, router) in enumerate(find_routers(reference).items()):
        reference.set_submodule(name, FixedRouter(family, router, wanted[:, :, layer].flatten(0, 1)))
    loss_of(reference).backward()
    ours = gradients(model)
    torch.testing.assert_close(ours, gradients(reference))
    assert all(ours[f"{name}.weight"].abs().max() > 1e-6 for name in find_routers(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_replays_again(reentrant):
    model = make_moe().train()
    wanted = other_choices(make_moe())
    with replayed_choices(find_routers(model), wanted, ALL):
        loss_of(model).backward()
    plain = gradients(model)
    model.zero_grad()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    routers = find_routers(model)
    with replayed_choices(routers, wanted, ALL), recorded_choices(routers) as choices:
        loss_of(model).backward()
    for forward, recomputed in choices.values():
        assert torch.equal(forward, recomputed)
    torch.testing.assert_close(gradients(model), plain)


def test_tokens_without_a_recording_route_freely():
    model = make_moe()
    routers = find_routers(model)
    wanted = other_choices(model)
    free = free_choices(model)
    wanted[:, 3:] = -1
    required = wanted[..., 0, 0] >= 0
    with torch.no_grad(), recorded_choices(routers) as choices, replayed_choices(routers, wanted, required):
        model(tokens())
    first = choices["model.layers.0.mlp.gate"][0].view(3, 7, 2)  # whose input does not depend on choices
    assert torch.equal(first[:, :3], wanted[:, :3, 0])
    assert torch.equal(first[:, 3:], free[:, 3:, 0])


def test_the_share_of_changed_choices_is_counted_over_required_tokens():
    model = make_moe()
    wanted = free_choices(model)
    required = ALL.clone()
    # In the last layer, so that nothing else changes: one of two experts, for two required and one other token.
    for row, position in ((0, 1), (2, 6), (1, 4)):
        pair = wanted[row, position, 1]
        pair[0] = next(expert for expert in range(6) if expert not in pair.tolist())
    required[1, 4] = False
    with torch.no_grad(), replayed_choices(find_routers(model), wanted, required) as report:
        model(tokens())
    assert report.tokens == 20
    assert report.agreement["model.layers.1.mlp.gate"] == pytest.approx(1 - 1 / 20)
    assert report.changed == pytest.approx(1 / 40)


def test_a_batch_in_parts_gets_the_recording_of_its_rows():
    model = make_moe()
    routers = find_routers(model)
    wanted = other_choices(model)
    ids = tokens()
    with torch.no_grad(), replayed_choices(routers, wanted, ALL) as report, recorded_choices(routers) as choices:
        for part in (ids[:2], ids[2:], ids[:1], ids[1:2], ids[2:]):
            model(part)
    for layer, passes in enumerate(choices.values()):
        twice = torch.cat([wanted[:, :, layer].flatten(0, 1)] * 2)
        assert torch.equal(torch.cat(passes), twice)
    assert report.tokens == 21
    assert set(report.agreement) == set(routers)


def test_missing_choices_are_an_error_with_numbers():
    model = make_moe()
    wanted = other_choices(model)
    wanted[1, 2:4] = -1
    wanted[2, 0, 1, 0] = -1
    message = r"covers 18 of 21 tokens \(85.7%\): in 2 of 3 sequences"
    with pytest.raises(RouterReplayError, match=message), replayed_choices(find_routers(model), wanted, ALL):
        pytest.fail("not entered")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (tokens(batch=4), "got 28 tokens where 3 sequences of 7 are left"),
        (tokens(length=6), "got 18 tokens"),
        (tokens()[:2], "got 2 of 3 sequences in a pass with gradients"),
    ],
    ids=["more sequences", "shorter ones", "a part with gradients"],
)
def test_a_pass_that_does_not_fit_the_recording_is_an_error(ids, message):
    model = make_moe()
    with pytest.raises(RouterReplayError, match=message):
        with replayed_choices(find_routers(model), other_choices(model), ALL):
            model(ids)


@pytest.mark.parametrize("count", [2, 0])
def test_sequences_without_a_pass_are_an_error(count):
    model = make_moe()
    with pytest.raises(RouterReplayError, match=f"chose for {count} of 3 sequences"):
        with torch.no_grad(), replayed_choices(find_routers(model), other_choices(model), ALL):
            if count > 0:
                model(tokens()[:count])


def test_a_recording_of_other_routers_is_an_error():
    model = make_moe()
    with pytest.raises(ValueError, match="must be .batch, length, 2 routers, k."):
        with replayed_choices(find_routers(model), other_choices(model)[:, :, :1], ALL):
            pass


def test_a_router_that_chooses_in_another_way_is_named():
    model = make_moe()
    router = model.model.layers[0].mlp.gate
    router.forward = lambda x: (None, None, torch.zeros(21, 2, dtype=torch.long))
    with pytest.raises(RouterReplayError, match="Qwen3MoeTopKRouter. chose 0 times by torch.topk"):
        with torch.no_grad(), replayed_choices(find_routers(model), other_choices(model), ALL):
            model(tokens())


def test_nothing_is_left_behind_by_an_exception():
    model = make_moe()
    router = model.model.layers[0].mlp.gate
    own = router.forward
    router.forward = own  # as accelerate's hooks leave it
    before = free_choices(model)
    with pytest.raises(ZeroDivisionError), replayed_choices(find_routers(model), other_choices(model), ALL):
        raise ZeroDivisionError
    assert router.__dict__["forward"] is own
    assert "forward" not in model.model.layers[1].mlp.gate.__dict__
    assert torch.equal(free_choices(model), before)
