# SPDX-License-Identifier: Apache-2.0
"""What parts of a model cost, on models of which one layer is made to be the dearest, and what is left out for a
budget."""

from dataclasses import replace

import pytest
import torch
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.analysis.perplexity import trials as trials_module
from hf_mxfp4.analysis.perplexity.costs import Part, mean_kl, part_cost, part_costs, parts_of
from hf_mxfp4.analysis.perplexity.log import ScoreLog
from hf_mxfp4.analysis.perplexity.operands import Operands, average_bits, averaged, count_operands
from hf_mxfp4.analysis.perplexity.results import Mean
from hf_mxfp4.analysis.perplexity.schemes import read_schemes
from hf_mxfp4.analysis.perplexity.scoring import reference_of, score
from hf_mxfp4.analysis.perplexity.suggest import Suggestion, split_texts, suggest
from hf_mxfp4.analysis.perplexity.swapped import swapped
from hf_mxfp4.analysis.perplexity.trials import trials_of
from hf_mxfp4.layers import MXFP4Linear, full_precision


TEXTS = [torch.randint(0, 32, (1, 24), generator=torch.Generator().manual_seed(n)) for n in range(8)]
DEAREST = "model.layers.1.mlp.down_proj"
NAMES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in (*(f"self_attn.{side}_proj" for side in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]


def planted():
    """A Llama whose `DEAREST` has in each block one weight that leaves the others no bits, and whose input is small
    where that weight is large: in full precision it computes what it did before."""
    model = make_model("llama")
    model.lm_head.weight.data *= 20  # predictions that differ
    mlp = model.model.layers[1].mlp
    mlp.down_proj.weight.data *= 100  # a part of the residual stream that matters
    mlp.up_proj.weight.data[::32] /= 64
    mlp.down_proj.weight.data[:, ::32] *= 64
    return model


def part_of(name, *layers):
    return Part(name, layers, (name,))


def scheme_of(text, **options):
    (scheme,) = read_schemes([text])
    return replace(scheme, config=replace(scheme.config, **options)) if options else scheme


def test_single_layers_in_full_precision():
    model, config = planted(), MXFP4RLConfig(dither_ties=False)
    with torch.no_grad(), swapped(model, replace(config, modules_to_not_convert=[DEAREST])):
        expected = model(TEXTS[0]).logits
    with torch.no_grad(), swapped(model, config):
        with full_precision(model, only=[DEAREST]) as count:
            assert count == 1 and torch.equal(model(TEXTS[0]).logits, expected)
        with full_precision(model, only=[]) as count:
            assert count == 0 and not torch.equal(model(TEXTS[0]).logits, expected)
        with pytest.raises(ValueError, match="model.layers.7.mlp is no quantized layer of LlamaForCausalLM; such are "):
            with full_precision(model, only=["model.layers.7.mlp"]):
                pass


def test_parts():
    assert parts_of(NAMES, "module") == [part_of(name, name) for name in NAMES]
    assert parts_of(NAMES, "layer") == [part_of(f"model.layers.{i}", *NAMES[7 * i : 7 * i + 7]) for i in (0, 1)]
    by_type = parts_of([*NAMES, "model.connector"], "type")
    values = [f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)]
    assert by_type[2] == part_of("self_attn.v_proj", *values)
    assert len(by_type) == 8 and by_type[7] == part_of("model.connector", "model.connector")
    # Numbers are left out of the names of types: no pattern then.
    experts = [f"model.layers.0.mlp.experts.{i}.up_proj" for i in (0, 1)]
    assert parts_of(experts, "type") == [Part("mlp.experts.up_proj", tuple(experts), tuple(experts))]
    with pytest.raises(ValueError, match="unit='head' is not known; choose one of module, type, layer"):
        parts_of(NAMES, "head")


def test_operands_are_counted():
    # Hidden 64, one key and value head of 32, MLP 96; 24 tokens.
    dense = count_operands(make_model("llama"), TEXTS[0])
    assert list(dense) == NAMES
    found = {name.rpartition(".")[2]: own for name, own in dense.items()}
    assert found == {
        "q_proj": Operands(4096, 1536),
        "k_proj": Operands(2048, 1536),
        "v_proj": Operands(2048, 1536),
        "o_proj": Operands(4096, 1536),
        "gate_proj": Operands(6144, 1536),
        "up_proj": Operands(6144, 1536),
        "down_proj": Operands(6144, 2304),
    }
    # Four experts of 32 features, gate and up in one weight; each token goes to two.
    mixture = count_operands(make_model("qwen3_moe"), TEXTS[0])
    assert mixture["model.layers.0.mlp.experts"] == Operands(4 * (64 * 64 + 32 * 64), 24 * 2 * (64 + 32))
    assert not any("gate" in name or "head" in name for name in mixture)


def test_average_bits():
    operands = {"a": Operands(300, 30), "b": Operands(100, 20)}
    weights, both = scheme_of("w4a16:rceil"), scheme_of("w4a4:rceil/rceil+of1.0")
    assert average_bits(weights, operands) == 4.25
    assert average_bits(weights, operands, ["b"]) == (3 * 4.25 + 16) / 4
    assert average_bits(both, operands, ["b"]) == ((3 * 4.25 + 16) / 4 + (3 * 8.5 + 2 * 16) / 5) / 2
    assert average_bits(both, operands, ["a", "b"]) == 16
    model = make_model("llama")
    own = averaged(
        scheme_of("w4a16:rceil", modules_to_not_convert=["layers.0"]), model, count_operands(model, TEXTS[0])
    )
    assert own.bits == own.average == (4.25 + 16) / 2 and own.weight_bits == 4.25
    assert averaged(weights, model, count_operands(model, TEXTS[0])) == weights


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("text", ["w4a16:rceil", "even+mbs128-blockwise+of1.0@0.1"])
def test_a_trial_is_what_a_model_is_with_these_layers_left_out(tmp_path, monkeypatch, family, text):
    model, scheme, batches = make_model(family, dtype=torch.bfloat16), scheme_of(text), TEXTS[:3]
    full = ["model.layers.1.mlp.down_proj" if family == "llama" else "model.layers.1.mlp.experts"]
    config = replace(scheme.config, modules_to_not_convert=full)
    with swapped(model, config):
        expected = score(model, reference_of(model, batches), batches)
    operands = count_operands(model, batches[0])
    with ScoreLog(tmp_path / "log.jsonl", {"of": "a test"}) as log:
        with trials_of(model, scheme, batches, operands, log=log) as trials:
            assert list(trials.scores(full)) == expected and list(trials.scores()) != expected
            assert trials.bits(full) == average_bits(scheme, operands, full) > trials.bits()
    # Afterwards the log has it, and the model is as it was.
    monkeypatch.setattr(trials_module, "score", None)
    told = []
    with ScoreLog(tmp_path / "log.jsonl", {"of": "a test"}) as log:
        with trials_of(
            model, scheme, batches, operands, log=log, on_tokens=lambda count, name: told.append(name)
        ) as trials:
            assert list(trials.scores(full)) == expected
    assert told == ["full precision"] * 3 + [text] * 3
    assert type(model.get_submodule("model.layers.0.self_attn.q_proj")) is torch.nn.Linear


def test_the_dearest_layer_is_found_and_chosen():
    model, scheme = planted(), scheme_of("w4a16:rceil")
    operands = count_operands(model, TEXTS[0])
    with trials_of(model, scheme, TEXTS[:4], operands) as trials:
        costs = part_costs(trials, parts_of(trials.names, "module"))
        base = mean_kl(trials.scores())
        assert len(costs) == 14 and costs[0].part.name == DEAREST
        # The divergence of the model, less what is left of it.
        assert costs[0].gain.value == pytest.approx(base.value - costs[0].kl.value)
        assert costs[0].gain.value > 3 * max(cost.gain.value for cost in costs[1:]) > 0
        assert costs[0].bits == pytest.approx((16 - 4.25) * 6144 / (2 * 30720))
        # By as much as the model takes with it and no more.
        exact = suggest(trials, costs, 4.25 + costs[0].bits)
        assert exact.parts[0].name == DEAREST and exact.bits <= exact.budget
        rounds = []
        wide = suggest(trials, costs, 6.5, lambda *told: rounds.append(told))
        assert wide.parts[0].name == DEAREST and len(wide.parts) > 1
        assert rounds[-1][:2] == (len(wide.parts), wide.bits) and [kl for *_, kl in rounds] == sorted(
            (kl for *_, kl in rounds), reverse=True
        )
    with swapped(model, wide.model_scheme().config):
        quantized = sum(m.weight.numel() for m in model.modules() if isinstance(m, MXFP4Linear))
    assert wide.bits == pytest.approx(4.25 * quantized / 61440 + 16 * (1 - quantized / 61440)) and wide.bits <= 6.5
    assert wide.model_scheme().bits == wide.bits


def test_gains_are_measured_again_beside_what_is_chosen():
    model = planted()
    with trials_of(model, scheme_of("w4a16:rceil"), TEXTS[:2], count_operands(model, TEXTS[0])) as trials:
        part = part_of("model.layers.0", *NAMES[:7])
        cost = part_cost(trials, part, [DEAREST])
        with_it, without = mean_kl(trials.scores([*NAMES[:7], DEAREST])), mean_kl(trials.scores([DEAREST]))
    assert cost.kl == with_it and cost.gain.value == pytest.approx(without.value - with_it.value)
    assert cost.sure_gain == cost.gain.value - cost.gain.error and cost.gain.error > 0
    assert cost.gain_per_bit == cost.gain.value / cost.bits


def test_what_is_suggested_can_be_loaded():
    scheme = scheme_of("w4a4:even+mbs128-blockwise/even", modules_to_not_convert=["layers.0.mlp"])
    found = Suggestion(scheme, (part_of("self_attn.v_proj"), part_of("model.layers.1")), 5.5, 6.0)
    assert found.options() == {
        "mode": "qat",
        "fprop": {"x": "mxfp4+even", "weight": "mxfp4+even+mbs128-blockwise"},
        "modules_to_not_convert": ["layers.0.mlp", "model.layers.1", "self_attn.v_proj"],
    }
    config = MXFP4RLConfig.from_dict(found.options())
    assert replace(config, dither_ties=False) == found.model_scheme().config
    assert found.name == "w4a4:even+mbs128-blockwise/even, 2 parts in full precision"


def test_texts_to_choose_by_are_not_those_to_measure_on():
    batches = [torch.full((1, 4), i) for i in range(10)]
    chosen, others = ([int(ids[0, 0]) for ids in part] for part in split_texts(batches))
    assert chosen == [0, 4, 8] and others == [1, 2, 3, 5, 6, 7, 9]
    # A text that is there twice is not on both sides.
    chosen, others = ([int(ids[0, 0]) for ids in part] for part in split_texts([batches[0], *batches]))
    assert chosen == [0, 4, 8] and others == [1, 2, 3, 5, 6, 7, 9]
    with pytest.raises(ValueError, match="7 texts are too few to choose by some and measure on others: give 8 or more"):
        split_texts([*batches[:7], batches[0]])


def test_budgets_that_cannot_be_met():
    model = planted()
    with trials_of(model, scheme_of("w4a16:rceil"), TEXTS[:2], count_operands(model, TEXTS[0])) as trials:
        costs = [part_cost(trials, part) for part in parts_of(trials.names, "layer")]
        with pytest.raises(
            ValueError, match="a budget of 4.2 bits is below the 4.2500 that w4a16:rceil takes by itself"
        ):
            suggest(trials, costs, 4.2)
        with pytest.raises(ValueError, match="no room for any part .* w4a16:rceil takes 10.1250; give that at least"):
            suggest(trials, costs, 10.1)
        useless = [replace(cost, gain=Mean(0.1, 0.2)) for cost in costs]
        with pytest.raises(ValueError, match="gains more than the standard error of its gain; give more texts"):
            suggest(trials, useless, 10.2)


def test_a_part_that_makes_it_worse_is_not_chosen(monkeypatch):
    model = planted()
    with trials_of(model, scheme_of("w4a16:rceil"), TEXTS[:2], count_operands(model, TEXTS[0])) as trials:
        first, second = (part_cost(trials, part) for part in parts_of(trials.names, "layer"))
        measured = trials.scores

        def scores(full=()):
            found = measured(full)
            return found if len(full) < 14 else tuple(replace(own, kl=own.kl + 100) for own in found)

        trials.scores = scores
        found = suggest(trials, [first, second], 16)
    assert found.parts == (second.part,) and found.bits == 10.125
