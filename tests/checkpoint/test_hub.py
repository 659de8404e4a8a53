# SPDX-License-Identifier: Apache-2.0
"""Push and pull over HTTP: the real client against a local server that speaks the Hub's API."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from hub_server import HubServer, Repo
from huggingface_hub import ModelCard
from processes import run, script
from transformers import AutoModelForCausalLM

import hf_mxfp4


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
    assert "model.safetensors.index.json" in files and "model.safetensors" not in files
    assert sum(name.endswith(".safetensors") for name in files) > 2
    assert set(hub.repos["org/mine"].files()) == set(hub.repos["org/qat"].files())
    assert (client[1] / "mine" / "notes.txt").read_text() == "not part of the model"
    assert hashlib.sha256(hub.repos["org/qat"].files()["model.safetensors"]).hexdigest() in hub.objects


def test_the_card_is_ours_unless_somebody_wrote_one_and_not_the_empty_one_of_transformers(client):
    qat, packed = card(client[0], "org/qat"), card(client[0], "org/packed")
    for ours, mode in ((qat, "qat"), (packed, "packed")):
        assert "More Information Needed" not in ours.text
        assert {"mxfp4", "mxfp4_rl", mode} <= set(ours.data.tags)
        assert ours.data.library_name == "transformers"
    assert "extra" in qat.data.tags and "extra" not in packed.data.tags
    assert ModelCard.load(client[1] / "again" / "README.md").data.base_model == "org/qat"
    assert 'from_pretrained("org/qat")' in qat.text and 'from_pretrained("org/packed")' in packed.text
    kept = card(client[0], "org/carded")
    assert "# Written by hand" in kept.text and kept.data.license == "mit" and "mine" in kept.data.tags
    assert client[0].repos["org/carded"].files()["data.bin"] == b"1"


def test_weights_of_an_earlier_push_do_not_stay_beside_the_new_ones(client):
    single, sharded = (set(client[0].repos[f"org/{name}"].files()) for name in ("single", "sharded"))
    assert {name for name in single if "safetensors" in name} == {"model.safetensors"}
    assert "model.safetensors" not in sharded and "model.safetensors.index.json" in sharded


def test_a_branch_is_made_and_pushed_to(client):
    repo = client[0].repos["org/qat"]
    assert repo.branches["dev"] != repo.branches["main"]
    assert repo.files("dev")["model.safetensors"] == repo.files()["model.safetensors"]


def test_an_upload_that_breaks_off_fails_and_succeeds_when_repeated(client):
    hub, _, results, _ = client
    assert "model.safetensors" in results["broken"] and results["retried"] == ""
    assert hub.broken_uploads == 0
    commits = hub.repos["org/broken"].commits
    assert len(commits) == 2  # the empty one, and the one that succeeded: nothing was committed by halves


@pytest.mark.parametrize("how", ["wrong token", "wrong token, saving"])
def test_a_wrong_token_is_named_and_costs_nothing(client, how):
    hub, folder, results, _ = client
    assert "401" in results[how] and "Invalid username or password" in results[how]
    assert "org/denied" not in hub.repos
    kept = AutoModelForCausalLM.from_pretrained(folder / "kept")
    assert kept.config.quantization_config == hf_mxfp4.MXFP4RLConfig()
    assert kept.quantization_report.n_quantized == 14
