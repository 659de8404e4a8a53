# SPDX-License-Identifier: Apache-2.0
"""Recording the experts chosen while `generate` runs."""

import pytest
import torch
from moe_models import make_moe

from hf_mxfp4.moe import ChoiceRecorder, find_routers, recorded_choices


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


def choices_alone(model, sequence):
    """The choices for one sequence without padding or cache: ``[length, layers, k]``."""
    with torch.no_grad(), recorded_choices(find_routers(model)) as choices:
        model(torch.tensor([sequence]))
    return torch.stack([passes[0] for passes in choices.values()], dim=1)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_each_sequence_gets_its_own_choices(family):
    model = make_moe(family)
    recorder = ChoiceRecorder(model, find_routers(model))
    with recorder.recording():
        completions = generate(model)
    rows = recorder.rows(PROMPTS, completions)
    for prompt, completion, row in zip(PROMPTS, completions, rows, strict=True):
        alone = choices_alone(model, [*prompt, *completion])
        assert row.dtype == torch.int16 and len(row) == len(prompt) + len(completion) - 1
        assert torch.equal(row.sort().values, alone[:-1].sort().values.to(torch.int16))


def test_sequences_that_ended_early():
    model = make_moe()
    recorder = ChoiceRecorder(model, find_routers(model))
    with recorder.recording():
        full = generate(model, new=6, suppress_tokens=[1])
    ended = [full[0][:2], full[1], full[2][:5]]  # as if they had ended there
    assert [len(row) for row in recorder.rows(PROMPTS, ended)] == [3 + 1, 5 + 5, 1 + 4]


def test_a_second_recording_replaces_the_first():
    model = make_moe()
    recorder = ChoiceRecorder(model, find_routers(model))
    with recorder.recording():
        generate(model, [[4, 4, 4, 4]])
    with recorder.recording():
        completions = generate(model)
    assert len(recorder.rows(PROMPTS, completions)) == 3


def test_what_cannot_be_told_apart_is_refused():
    model = make_moe()
    recorder = ChoiceRecorder(model, find_routers(model))
    with recorder.recording():
        completions = generate(model, use_cache=False)
    with pytest.raises(ValueError, match="key-value cache.*set use_cache=True"):
        recorder.rows(PROMPTS, completions)
    with recorder.recording():
        completions = generate(model)
    wrong = [completions[0], [completions[1][0] ^ 2, *completions[1][1:]], completions[2]]
    with pytest.raises(ValueError, match="sequence 1 came back with 5 . 4 tokens that are not the"):
        recorder.rows(PROMPTS, wrong)
    with pytest.raises(ValueError, match="recorded 3 sequences but 2 came back"):
        recorder.rows(PROMPTS[:2], completions[:2])
    with recorder.recording():
        pass
    with pytest.raises(ValueError, match="key-value cache"):
        recorder.rows(PROMPTS, completions)


def test_generation_past_the_routers_is_refused():
    model = make_moe()
    routers = dict(find_routers(model))
    routers["elsewhere"] = make_moe().model.layers[0].mlp.gate
    recorder = ChoiceRecorder(model, routers)
    with recorder.recording():
        completions = generate(model)
    with pytest.raises(ValueError, match="elsewhere routed 0 tokens in 0 passes while the model read"):
        recorder.rows(PROMPTS, completions)
