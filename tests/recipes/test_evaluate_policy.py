# SPDX-License-Identifier: Apache-2.0
"""What an evaluation loads: the policy's own scheme is in force and said, and a control is one."""

import json
import shutil

import pytest
import torch
from commands import change_in_place
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from same_bits import logits
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig, lab
from hf_mxfp4.layers import QUANTIZED
from hf_mxfp4.recipes.evaluation.arguments import EvaluationArguments
from hf_mxfp4.recipes.evaluation.policy import folder_digest
from hf_mxfp4.recipes.evaluation.policy import load_policy as load
from hf_mxfp4.recipes.tasks import ALPHABET
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer


SCHEME = MXFP4RLConfig()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and, made from it: a trained-looking policy, packed weights, and adapters on each kind of base."""
    root = tmp_path_factory.mktemp("policies")
    tokenizer = build_char_tokenizer(ALPHABET)
    made = {name: str(root / name) for name in ("base", "policy", "packed", "on_policy", "on_base", "on_packed")}
    make_model(layers=2, hidden=32, intermediate=48).save_pretrained(made["base"])
    tokenizer.save_pretrained(made["base"])
    policy = AutoModelForCausalLM.from_pretrained(made["base"], quantization_config=SCHEME)
    policy.save_pretrained(made["policy"])
    tokenizer.save_pretrained(made["policy"])
    hf_mxfp4.pack(AutoModelForCausalLM.from_pretrained(made["policy"])).save_pretrained(made["packed"])
    tokenizer.save_pretrained(made["packed"])
    packed = {"quantization_config": MXFP4RLConfig(mode="packed")}
    for name, base, options in (("on_policy", "policy", {}), ("on_base", "base", packed), ("on_packed", "packed", {})):
        model = AutoModelForCausalLM.from_pretrained(made[base], **options)
        torch.manual_seed(1)
        lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(model, lora).save_pretrained(made[name])
    return made


def load_policy(model, control=None, **options):
    return load(EvaluationArguments(model=model, dequantize=control, **options))


def about(policy, *names):
    return tuple(policy.description[name] for name in names)


def n_layers(policy):
    return sum(isinstance(module, QUANTIZED) for module in policy.model.modules())


def test_a_policy_is_evaluated_under_its_own_scheme(folders):
    """The scheme comes from the checkpoint, its layers are counted, and the result names it."""
    policy = load_policy(folders["policy"])
    assert about(policy, "computed_in", "scheme") == (SCHEME.describe(), SCHEME.describe())
    assert about(policy, "n_quantized", "n_skipped") == (14, 1)
    assert n_layers(policy) == 14
    assert policy.description["weight_sqnr_db"] > 10
    assert torch.equal(logits(policy.model), logits(AutoModelForCausalLM.from_pretrained(folders["policy"])))
    assert not torch.equal(logits(policy.model), logits(load_policy(folders["base"]).model))


def test_a_folder_without_a_tokenizer_is_refused(folders, tmp_path):
    make_model("gemma2").save_pretrained(tmp_path)  # of which transformers makes a tokenizer that knows no words
    with pytest.raises(FileNotFoundError, match="holds no tokenizer; save it there with tokenizer.save_pretrained"):
        load(EvaluationArguments(model=str(tmp_path)))


@pytest.mark.parametrize("read", [lambda folder: load_policy(folder), lab.load], ids=["evaluate", "eval"])
def test_the_folder_of_a_run_is_refused_with_the_folder_of_its_model(read, tmp_path):
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "config.json").write_text("{}")
    with pytest.raises((OSError, ValueError), match=f"config.json is missing; give {tmp_path}/student$"):
        read(str(tmp_path))


def test_a_plain_model_that_lacks_a_tensor_is_refused(folders, tmp_path):
    shutil.copytree(folders["base"], tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="no file of .*base has model.norm.weight"):
        load(EvaluationArguments(model=str(tmp_path / "base")))


def test_the_control_on_masters_is_full_precision_and_says_so(folders):
    control = load_policy(folders["policy"], control="masters")
    assert torch.equal(logits(control.model), logits(load_policy(folders["base"]).model))
    assert about(control, "n_quantized", "weight_sqnr_db", "scheme") == (0, None, SCHEME.describe())
    assert n_layers(control) == 0
    computed_in = control.description["computed_in"]
    assert computed_in.startswith("CONTROL: full precision on the master weights (float32)")
    assert SCHEME.describe() in computed_in


def test_packed_weights(folders, dense_products):
    packed = load_policy(folders["packed"])
    assert (*about(packed, "n_quantized", "scheme"), n_layers(packed)) == (14, SCHEME.describe(), 14)
    assert torch.equal(logits(packed.model), logits(load_policy(folders["policy"]).model))
    assert n_layers(load_policy(folders["packed"], control="quantized")) == 0
    for name in ("packed", "on_packed"):
        with pytest.raises(ValueError, match="master weights are gone: .* --dequantize quantized"):
            load_policy(folders[name], control="masters")


@pytest.mark.parametrize(("adapter", "base"), [("on_policy", "policy"), ("on_base", "base"), ("on_packed", "packed")])
def test_an_adapter_is_evaluated_on_its_base_in_the_scheme_it_was_trained_on(folders, adapter, base):
    found = load_policy(folders[adapter])
    recorded = json.loads(open(f"{folders[adapter]}/adapter_config.json").read())["base_quantization"]
    assert found.description["scheme"] == MXFP4RLConfig.from_dict(recorded).describe()
    assert (*about(found, "n_quantized", "adapter_on"), n_layers(found)) == (14, folders[base], 14)
    assert not torch.equal(logits(found.model), logits(load_policy(folders[base]).model))  # the adapter does something


def test_a_base_that_moved_is_named(folders, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(folders["base"], moved)
    found = load_policy(folders["on_base"], base=str(moved))
    assert found.description["adapter_on"] == str(moved)
    assert torch.equal(logits(found.model), logits(load_policy(folders["on_base"]).model))
    with pytest.raises(ValueError, match="is no adapter, so it takes no base"):
        load_policy(folders["policy"], base=str(moved))


def test_a_model_without_a_scheme_is_called_that_and_has_no_control(folders):
    found = about(load_policy(folders["base"]), "scheme", "computed_in")
    assert found == (None, "full precision (float32); the checkpoint carries no scheme")
    for control in ("masters", "quantized"):
        with pytest.raises(ValueError, match="carries no MXFP4 scheme, so there is nothing to dequantize"):
            load_policy(folders["base"], control=control)


def test_the_digest_follows_the_weights_and_survives_a_copy(folders, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folders["policy"], copy)
    assert folder_digest(copy) == folder_digest(copy.parent / "copy") == load_policy(folders["policy"]).identity
    (copy / "README.md").write_text("another card")
    assert folder_digest(copy) == load_policy(folders["policy"]).identity
    change_in_place(copy / "model.safetensors")
    assert folder_digest(copy) != load_policy(folders["policy"]).identity
