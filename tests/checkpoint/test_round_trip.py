# SPDX-License-Identifier: Apache-2.0
"""Save and load: the scheme comes back by itself, the masters bit for bit, in this process and in a new one."""

import os

import pytest
import torch
from export_files import config_in, header_and_data
from factors import factors_config
from processes import code, run
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Linear, pack


IDS = torch.arange(2, 14).view(2, 6)


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=factors_config(**options))


def count(model) -> int:
    return sum(isinstance(module, MXFP4Linear) for module in model.modules())


SCHEMES = {
    "default": {},
    "weight-only": {"preset": "w4a16"},
    "ocp-with-skips": {
        "scale_rule": "floor",
        "macro_block": None,
        "outlier_fallback": None,
        "modules_to_not_convert": ["layers.0.mlp", "re:.*o_proj"],
        "backend": "eager",
    },
}


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"], ids=["one-file", "sharded"])
@pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)
def test_the_scheme_comes_back_without_being_named(options, shard_size, checkpoint, tmp_path):
    source, target = checkpoint("qwen2"), tmp_path / "saved"
    model = load(source, **options)
    model.save_pretrained(target, max_shard_size=shard_size)
    assert (len(list(target.glob("*.safetensors"))) > 2) == (shard_size == "20KB")
    assert config_in(target)["quantization_config"] == factors_config(**options).to_dict()

    again = AutoModelForCausalLM.from_pretrained(target)
    assert again.hf_quantizer.quantization_config == factors_config(**options)
    assert again.quantization_report == model.quantization_report
    assert count(again) == count(model) == model.quantization_report.n_quantized
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    arguments = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(again.generate(IDS, **arguments), model.generate(IDS, **arguments))


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_only_the_scheme_is_added_to_the_config(mode, checkpoint, tmp_path):
    source, target = checkpoint("qwen2"), tmp_path / "saved"
    load(source, mode=mode).save_pretrained(target)
    before, after = (config_in(folder) for folder in (source, target))
    assert after.pop("quantization_config") == factors_config(mode=mode).to_dict()
    assert "import hf_mxfp4" in after.pop("transformers_weights")  # which stops transformers without it
    assert after == before


@pytest.mark.parametrize("mode", ["qat", "packed"])
def test_saving_a_loaded_model_again_changes_nothing(mode, checkpoint, tmp_path):
    load(checkpoint("qwen2", dtype=torch.bfloat16), mode=mode).save_pretrained(tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    # But for the order of the entries of its metadata, which safetensors writes in any.
    one, two = (header_and_data(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / "config.json").read_bytes() == (tmp_path / "two" / "config.json").read_bytes()


@pytest.mark.usefixtures("dense_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trained_model_round_trips(dtype, checkpoint, tmp_path):
    source = checkpoint("qwen2", dtype=dtype)
    model = load(source).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.equal(again(IDS).logits, expected)
    assert not torch.equal(load(source)(IDS).logits, expected)
    trained = dict(again.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
    assert torch.equal(pack(again)(IDS).logits, expected)


def test_a_new_process_applies_and_prints_the_scheme(checkpoint, tmp_path):
    model = load(checkpoint("qwen2"), scale_rule="even")
    model.save_pretrained(tmp_path / "saved")
    program = (
        "import hf_mxfp4, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('saved')\n"
        "ids = torch.arange(2, 14).view(2, 6)\n"
        "tokens = model.generate(ids, max_new_tokens=8, do_sample=False)\n"
        "torch.save({'logits': model(ids).logits.detach(), 'tokens': tokens}, 'out.pt')\n"
    )
    done = run(code(program), cwd=tmp_path, environment=os.environ | {"HF_MXFP4_VERBOSITY": "info"})
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stderr.splitlines() if "hf_mxfp4" in line]
    assert printed == [f"[hf_mxfp4] Qwen2ForCausalLM: {model.quantization_report}"]
    assert "n_quantized=14" in printed[0] and "mxfp4+even+mbs128-dynamic+of0.5" in printed[0]
    assert "hf_mxfp4" not in done.stdout
    out = torch.load(tmp_path / "out.pt")
    assert torch.equal(out["logits"], model(IDS).logits)
    assert torch.equal(out["tokens"], model.generate(IDS, max_new_tokens=8, do_sample=False))
