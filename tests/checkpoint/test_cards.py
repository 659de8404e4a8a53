# SPDX-License-Identifier: Apache-2.0
"""The generated model card: what it says, that the numbers are right, whose text it leaves alone, and that a save does
not fail for it. Push and pull over HTTP: the real client against a local server that speaks the Hub's API."""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
import transformers
from hub_server import HubServer, Repo
from huggingface_hub import ModelCard, ModelCardData
from processes import run, script
from safetensors.torch import load, load_file
from same_bits import logits
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import (
    add_evaluation,
    auto_class,
    choose_card,
    is_generated,
    make_card,
    pack_checkpoint,
    save_card,
)


SUMMARY = {
    "task": "arithmetic", "scheme": "w4a4 [...]", "seed": 7, "steps": 200, "n_test": 500,
    "accuracy_before": {"exact": 0.428}, "accuracy_after": {"exact": 0.696}, "saved": "outputs/run/policy",
}  # fmt: skip
EMPTY = (
    "---\nlibrary_name: transformers\ntags: []\n---\n# Model Card for Model ID\n"
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. [More Information Needed]\n"
)
#: No YAML; no dictionary; no metadata of a card.
BROKEN = ["---\n: [unclosed\n---\nhello", "---\n- a\n- b\n---\nx", "---\nbase_model: [a]\ntags: 5\n---\nx"]


@pytest.fixture
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=MXFP4RLConfig())


def numbers(text: str) -> dict[str, str]:
    """Rows of two columns of the tables in a card."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_metadata_scheme_and_loading(model):
    text = make_card(model).text
    data = make_card(model).data
    rows = numbers(text)
    assert rows["mode"] == "`qat`"
    assert rows["preset"] == "`w4a8`"
    assert rows["scheme"] == f"`{MXFP4RLConfig().describe()}`"
    assert "mxfp4+even+mbs128" in rows["scheme"]
    assert rows["quantized layers"] == "14"
    assert rows["linear layers in full precision"] == "1 (lm_head)"
    assert "import hf_mxfp4" in text
    assert "AutoModelForCausalLM.from_pretrained(" in text
    assert data.library_name == "transformers"
    assert data.tags == ["mxfp4", "mxfp4_rl", "hf-mxfp4", "qat"]
    assert data.base_model is None
    assert data.eval_results is None
    model.config._name_or_path = "Qwen/Qwen2.5-3B"
    data = make_card(model).data
    assert data.base_model == "Qwen/Qwen2.5-3B"
    assert data.get("base_model_relation") is None
    packed = make_card(hf_mxfp4.pack(model)).data
    assert packed.tags[-1] == "packed"
    assert packed.get("base_model_relation") == "quantized"


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, "MXFP4"),
        ({"mode": "packed"}, "MXFP4"),
        ({"preset": "w8a8"}, "FP8"),
        ({"fprop": {"weight": "nvfp4"}}, "NVFP4"),
        ({"fprop": {"weight": "full"}}, "full-precision"),
    ],
)
def test_the_format_of_the_weights_and_what_is_needed_to_load_them(checkpoint, options, weights):
    config = MXFP4RLConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), quantization_config=config)
    text = make_card(model).text
    assert f"Linear layers with {weights} weights." in text
    assert "Without it transformers refuses to load the files." in text


@pytest.mark.parametrize("options", [{}, {"fprop": {"weight": "even+mbs128-blockwise+32x32"}}])
def test_the_error_is_that_of_the_weights(checkpoint, options):
    config = MXFP4RLConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama", hidden=64), quantization_config=config)
    energy = error = 0.0
    for layer in model.modules():
        if isinstance(layer, hf_mxfp4.MXFP4Linear):
            weight = layer.weight.detach().mul_(1.7)  # not the weights that were loaded
            quantized = hf_mxfp4.fake_quantize(weight, **vars(config.weight_scheme))
            energy += weight.double().square().sum().item()
            error += (quantized - weight).double().square().sum().item()
    assert f"ratio {-10 * math.log10(error / energy):.2f} dB, measured on these master weights" in make_card(model).text


def test_what_cannot_be_measured_is_said(model, checkpoint):
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.empty(0))  # sharded by ZeRO-3
    assert "error of the weights\n\nNot measured." in make_card(model).text
    config = MXFP4RLConfig(fprop={"weight": "full"})
    unquantized = AutoModelForCausalLM.from_pretrained(checkpoint("llama", hidden=64), quantization_config=config)
    report = unquantized.quantization_report
    assert report.sqnr_db is None
    assert not report.masters_on_grid
    assert "Not measured." in make_card(unquantized).text


def test_packed_models_keep_the_ratio_measured_when_they_were_packed(model, tmp_path):
    packed = hf_mxfp4.pack(model)
    expected = f"{packed.quantization_report.sqnr_db:.2f} dB, measured when the weights were packed"
    assert expected in make_card(packed).text
    packed.save_pretrained(tmp_path / "first")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert expected in make_card(again).text
    again.save_pretrained(tmp_path / "second")
    assert expected in (tmp_path / "second" / "README.md").read_text()
    rows = numbers(make_card(again).text)
    assert rows["bits per quantized weight"] == f"{packed.quantization_report.bits_per_weight:.4g}"


def test_an_evaluation_goes_into_text_and_metadata(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    add_evaluation(tmp_path, tmp_path / "summary.json")
    card = ModelCard.load(tmp_path / "README.md")
    assert "| exact | 0.428 [0.385, 0.472] | 0.696 [0.654, 0.735] |" in card.text
    assert "500 held-out problems of `arithmetic`" in card.text
    assert "seed 7" in card.text
    assert "No evaluation came" not in card.text
    assert "## Not measured" in card.text
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("arithmetic", "accuracy", 0.696)
    assert card.data.model_name == "policy"
    assert is_generated(str(card))
    add_evaluation(tmp_path, {**SUMMARY, "accuracy_after": {"exact": 0.5}})
    again = ModelCard.load(tmp_path / "README.md")
    assert "0.500" in again.text
    assert "0.696" not in again.text
    assert len(again.data.eval_results) == 1
    model.save_pretrained(tmp_path)
    assert "No evaluation came" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_card_that_is_a_link_is_replaced_and_its_target_left_alone(model, tmp_path, link):
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").rename(tmp_path / "card")
    text = (tmp_path / "card").read_text()
    link(tmp_path / "saved" / "README.md", tmp_path / "card")
    add_evaluation(tmp_path / "saved", SUMMARY)
    assert (tmp_path / "card").read_text() == text
    assert "seed 7" in (tmp_path / "saved" / "README.md").read_text()


@pytest.mark.parametrize("edit", ["written by hand", "edited"])
def test_a_card_that_somebody_wrote_is_not_touched(model, tmp_path, edit):
    text = "# Mine\n"
    if edit == "edited":
        model.save_pretrained(tmp_path)
        text = (tmp_path / "README.md").read_text().replace("## Scheme", "My own words.\n\n## Scheme")
    (tmp_path / "README.md").write_text(text)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == text
    with pytest.raises(ValueError, match="written or edited by somebody"):
        add_evaluation(tmp_path, SUMMARY)


def test_which_card_is_uploaded(model, tmp_path):
    """Ours, renewed, unless somebody wrote the one on the Hub or the one that lies beside the model."""
    assert choose_card(None, tmp_path, [], "org/name").data.tags == ["mxfp4", "mxfp4_rl", "hf-mxfp4"]
    save_card(model, tmp_path)
    ours = choose_card(None, tmp_path, ["extra"], "org/name")
    assert 'from_pretrained("org/name")' in ours.text
    assert "extra" in ours.data.tags
    assert is_generated(str(ours))
    assert "More Information" not in choose_card(EMPTY, tmp_path, [], "org/name").text
    written = choose_card("---\ntags: [a]\n---\n# Mine\n", tmp_path, ["b"], "org/name")
    assert written.text.strip() == "# Mine"
    assert written.data.tags == ["a", "b"]
    older = str(choose_card(None, tmp_path, [], "org/name"))
    save_card(hf_mxfp4.pack(model), tmp_path)
    assert numbers(choose_card(older, tmp_path, [], "org/name").text)["mode"] == "`packed`"
    (tmp_path / "README.md").write_text("---\ntags: [a]\n---\n# Mine\n")
    assert choose_card(EMPTY, tmp_path, [], "org/name").text.strip() == "# Mine"


def test_a_card_of_transformers_that_somebody_filled_in_is_kept(model, tmp_path):
    description = (
        "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
        "automatically generated."
    )
    card = ModelCard.from_template(ModelCardData(library_name="transformers"), model_description=description)
    save_card(model, tmp_path)
    assert "## Scheme" in choose_card(str(card), tmp_path, [], "org/name").text
    filled = str(card).replace("- **Developed by:** [More Information Needed]", "- **Developed by:** Ada")
    assert "**Developed by:** Ada" in choose_card(filled, tmp_path, [], "org/name").text


def test_a_repository_is_not_its_own_base(model, tmp_path):
    model.config._name_or_path = "org/name"
    save_card(hf_mxfp4.pack(model), tmp_path)
    card = choose_card(None, tmp_path, [], "org/name")
    assert card.data.base_model is None
    assert "base_model" not in card.data.to_yaml()
    assert choose_card(None, tmp_path, [], "org/other").data.base_model == "org/name"


@pytest.mark.parametrize("text", BROKEN)
def test_a_readme_that_is_no_card_does_not_end_a_save(checkpoint, tmp_path, text):
    AutoModelForCausalLM.from_pretrained(checkpoint("qwen2")).save_pretrained(tmp_path / "base")
    (tmp_path / "saved").mkdir()
    for folder in ("base", "saved"):
        (tmp_path / folder / "README.md").write_text(text)
    config = MXFP4RLConfig(mode="packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    for folder in ("saved", "fresh"):
        model.save_pretrained(tmp_path / folder)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / folder)), logits(model))
    assert (tmp_path / "saved" / "README.md").read_text() == text


def test_whatever_fails_in_making_a_card_is_a_warning(model, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("no card today")

    monkeypatch.setattr("hf_mxfp4.checkpoint.card.make_card", fail)
    model.save_pretrained(tmp_path / "saved")
    assert "no model card was written: RuntimeError: no card today" in capsys.readouterr().err
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))


def test_a_card_that_somebody_wrote_outlives_one_that_cannot_be_made(checkpoint, tmp_path, monkeypatch):
    config = MXFP4RLConfig(mode="packed")
    pack_checkpoint(checkpoint("qwen2"), tmp_path / "packed", config)
    (tmp_path / "packed" / "README.md").write_text(WRITTEN_CARD)

    def fail(*args, **kwargs):
        raise RuntimeError("no card today")

    monkeypatch.setattr("hf_mxfp4.checkpoint.card.find_layers", fail)
    pack_checkpoint(checkpoint("qwen2", seed=1), tmp_path / "packed", config, overwrite=True)
    assert (tmp_path / "packed" / "README.md").read_text() == WRITTEN_CARD


def test_the_class_that_a_card_names_has_the_head():
    expected = {
        "Qwen2ForCausalLM": "AutoModelForCausalLM",
        "GPT2LMHeadModel": "GPT2LMHeadModel",
        "BertForMaskedLM": "AutoModelForMaskedLM",
        "T5ForConditionalGeneration": "T5ForConditionalGeneration",
        "T5EncoderModel": "T5EncoderModel",
        "ModelOfSomebodyForCausalLM": "AutoModelForCausalLM",
    }
    assert {name: auto_class(name) for name in expected} == expected
    assert all(hasattr(transformers, name) for name in expected.values())


CLIENT = Path(__file__).with_name("run_hub_client.py")
PULLED = [f"org/{name}" for name in ("qat", "packed", "single", "sharded", "broken", "carded", "mine")]
WRITTEN_CARD = "---\nlicense: mit\ntags: [mine]\n---\n# Written by hand\n"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """The server after everything was pushed, the folder of the client, and what it reported of pushes and pulls."""
    folder = tmp_path_factory.mktemp("hub")
    with HubServer() as hub:
        hub.repos["org/carded"] = Repo()
        hub.repos["org/carded"].commit("main", {"README.md": WRITTEN_CARD.encode(), "data.bin": b"1"})
        for name, text in (("slow", WRITTEN_CARD), ("unreadable", BROKEN[0])):
            hub.repos[f"org/{name}"] = Repo()
            hub.repos[f"org/{name}"].commit("main", {"README.md": text.encode()})
        hub.unreachable.add("org/slow/README.md")
        hub.broken_uploads = 6  # as often as the client tries one file
        environment = os.environ | hub.environment(str(folder / "cache"))
        done = run(script(CLIENT, folder, *PULLED), environment=environment, no_warnings=True)
        assert done.returncode == 0, done.stderr
        yield hub, folder, *json.loads(done.stdout.splitlines()[-1])


def card(hub: HubServer, name: str, branch: str = "main") -> ModelCard:
    return ModelCard(hub.repos[name].files(branch)["README.md"].decode())


@pytest.mark.parametrize("name", PULLED)
def test_pulled_models_repeat_the_logits_of_the_pushed_ones(client, name):
    mode = "qat" if name in ("org/qat", "org/broken") else "packed"
    result = client[3][name]
    assert result["mode"] == mode
    assert torch.equal(torch.tensor(result["logits"]), torch.load(client[1] / f"{mode}.pt", weights_only=True))


def test_what_is_pushed_is_the_model_and_its_card_and_no_file_beside_it(client):
    hub = client[0]
    assert set(hub.repos["org/qat"].files()) == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "mxfp4_manifest.json"
    }  # fmt: skip
    files = set(hub.repos["org/packed"].files())
    assert "model.safetensors.index.json" in files
    assert "model.safetensors" not in files
    assert sum(name.endswith(".safetensors") for name in files) > 2
    assert set(hub.repos["org/mine"].files()) == set(hub.repos["org/qat"].files())
    assert (client[1] / "mine" / "notes.txt").read_text() == "not part of the model"
    assert hashlib.sha256(hub.repos["org/qat"].files()["model.safetensors"]).hexdigest() in hub.objects


def test_the_card_is_ours_unless_somebody_wrote_one_and_not_the_empty_one_of_transformers(client):
    qat = card(client[0], "org/qat")
    packed = card(client[0], "org/packed")
    for ours, mode in ((qat, "qat"), (packed, "packed")):
        assert "More Information Needed" not in ours.text
        assert {"mxfp4", "mxfp4_rl", mode} <= set(ours.data.tags)
        assert ours.data.library_name == "transformers"
    assert "extra" in qat.data.tags
    assert "extra" not in packed.data.tags
    assert ModelCard.load(client[1] / "again" / "README.md").data.base_model == "org/qat"
    assert 'from_pretrained("org/qat")' in qat.text
    assert 'from_pretrained("org/packed")' in packed.text
    kept = card(client[0], "org/carded")
    assert "# Written by hand" in kept.text
    assert kept.data.license == "mit"
    assert "mine" in kept.data.tags
    assert client[0].repos["org/carded"].files()["data.bin"] == b"1"


@pytest.mark.parametrize(("name", "text"), [("slow", WRITTEN_CARD), ("unreadable", BROKEN[0])])
def test_a_card_on_the_hub_that_cannot_be_read_is_not_replaced(client, name, text):
    files = client[0].repos[f"org/{name}"].files()
    assert files["README.md"].decode() == text
    assert "model.safetensors" in files


def test_tags_of_the_model_and_of_the_call_are_in_the_card(client):
    assert {"of the model", "given"} <= set(card(client[0], "org/tagged").data.tags)


def test_adapters_leave_the_weights_of_their_base_in_the_repository(client):
    pytest.importorskip("peft", MIN_PEFT_VERSION)  # transformers 5.24 asks for one that there is not yet
    before, after = list(client[0].repos["org/adapted"].commits.values())[-2:]
    assert "adapter_model.safetensors" in after
    assert after["model.safetensors"] == before["model.safetensors"]


def test_options_of_a_save_are_those_of_its_upload(client):
    pytest.importorskip("peft", MIN_PEFT_VERSION)  # transformers 5.24 asks for one that there is not yet
    pushed = load(client[0].repos["org/adapter"].files()["adapter_model.safetensors"])
    assert pushed.keys() == load_file(client[1] / "adapter" / "adapter_model.safetensors").keys()
    assert not any(name.startswith("base_model.model.") for name in pushed)


def test_weights_of_an_earlier_push_do_not_stay_beside_the_new_ones(client):
    single, sharded = (set(client[0].repos[f"org/{name}"].files()) for name in ("single", "sharded"))
    assert {name for name in single if "safetensors" in name} == {"model.safetensors"}
    assert "model.safetensors" not in sharded
    assert "model.safetensors.index.json" in sharded


def test_a_branch_is_made_and_pushed_to(client):
    repo = client[0].repos["org/qat"]
    assert repo.branches["dev"] != repo.branches["main"]
    assert repo.files("dev")["model.safetensors"] == repo.files()["model.safetensors"]


def test_an_upload_that_breaks_off_fails_and_succeeds_when_repeated(client):
    hub, _, results, _ = client
    assert "model.safetensors" in results["broken"]
    assert results["retried"] == ""
    assert hub.broken_uploads == 0
    commits = hub.repos["org/broken"].commits
    assert len(commits) == 2  # the empty one, and the one that succeeded: nothing was committed by halves


@pytest.mark.parametrize("how", ["wrong token", "wrong token, saving"])
def test_a_wrong_token_is_named_and_costs_nothing(client, how):
    hub, folder, results, _ = client
    assert "401" in results[how]
    assert "Invalid username or password" in results[how]
    assert "org/denied" not in hub.repos
    kept = AutoModelForCausalLM.from_pretrained(folder / "kept")
    assert kept.config.quantization_config == hf_mxfp4.MXFP4RLConfig()
    assert kept.quantization_report.n_quantized == 14
