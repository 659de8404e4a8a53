# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 train`: one command from a checkpoint and problems of the user to a packed policy."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import run, save_texts
from same_bits import tensors_in
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig, pack
from hf_mxfp4.recipes import train
from hf_mxfp4.recipes.post_training.policy import usual_learning_rate
from hf_mxfp4.recipes.tasks.tiny_model import TINY_MODELS, build_byte_tokenizer
from hf_mxfp4.rl.config import count_quantized


pytestmark = pytest.mark.usefixtures("blank_pictures")
REWARD = "def length(completions, answer, **kwargs):\n    return [len(c[0]['content']) / 16 for c in completions]\n"
CPU = ["--use_cpu=true", "--bf16=false", "--lora_r=2", "--report_every=0"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """`own(family)`: the words for a model of a family and for problems and a reward of the user; their folder."""
    folder = tmp_path_factory.mktemp("own")
    save_texts(folder / "sums.jsonl", ({"question": f"{i}+1=", "answer": f"{i + 1}"} for i in range(20)))
    (folder / "mine.py").write_text(REWARD)

    def words(family="qwen2"):
        tokenizer = build_byte_tokenizer()
        model = folder / family
        if not model.exists():
            TINY_MODELS[family](tokenizer, hidden_size=32, num_layers=2, intermediate_size=128).save_pretrained(model)
            tokenizer.save_pretrained(model)
        data = [f"--dataset={folder / 'sums.jsonl'}", f"--reward={folder / 'mine.py'}:length"]
        return [str(model), *data, *CPU], folder

    return words


def test_everything_is_tried_in_a_few_steps_and_in_a_folder_of_its_own(own, capsys):
    words, folder = own()
    words += [f"--output_dir={folder / 'run'}", "--smoke"]
    summary = train.main(words)
    printed = capsys.readouterr().out
    out = folder / "run-smoke"
    assert not (folder / "run").exists()
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (summary["steps"], summary["distilled"]["steps"], summary["n_test"]) == (3, 2, 4)
    assert summary["scheme"].startswith("w4a8 ")
    assert summary["n_quantized"] == 14
    assert summary["reloaded"] == {"compared": 4, "identical": 4}
    packed = AutoModelForCausalLM.from_pretrained(out / "policy-packed")
    assert count_quantized(packed) == 14
    assert packed.hf_quantizer.quantization_config.mode == "packed"
    assert "exact_match" in (out / "policy-packed" / "README.md").read_text()
    assert 0 < summary["bytes_packed"] < summary["bytes_of_start"]
    assert f"hf-mxfp4 evaluate {out}/policy-packed --task file --dataset {folder}/sums.jsonl" in printed
    assert f"vllm serve {out}/policy-packed" in printed
    assert printed.count("its numbers mean nothing") == 2
    # A smoke run is written over by the next one, and nothing else is.
    words_of_next, _ = train.words_for_grpo(words)
    assert "--overwrite" in words_of_next
    (out / train.MARK).unlink()
    with pytest.raises(SystemExit, match="run-smoke holds something else than a smoke run"):
        train.main(words)


def test_adapters_of_a_mixture_are_trained_on_packed_weights(own):
    words, folder = own("qwen3_moe")
    summary = train.main([*words, f"--output_dir={folder / 'lora'}", "--use_peft=true", "--smoke"])
    policy = folder / "lora-smoke" / "policy"
    assert summary["adapter"]
    assert summary["distilled"]["steps"] == 2
    assert summary["learning_rate"] == 1e-5  # its weights are drawn with a standard deviation of 0.02
    scheme = json.loads((policy / "adapter_config.json").read_text())["base_quantization"]
    assert MXFP4RLConfig.from_dict(scheme).mode == "packed"
    assert summary["packed"] == str(folder / "lora-smoke" / "base-packed")
    distilled = tensors_in(folder / "lora-smoke" / "distilled")
    assert any((distilled[name] != tensor).any() for name, tensor in tensors_in(policy).items())


@pytest.mark.parametrize(
    ("size", "packed", "adapters", "rate"),
    [(0.2, False, False, 1e-5), (0.04, False, False, 2e-6), (0.04, False, True, 2e-5), (0.75, True, True, 4e-4)],
)
def test_the_usual_learning_rate_follows_the_size_of_the_weights(size, packed, adapters, rate):
    model = make_model()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, size)
    if packed:
        model = pack(model, MXFP4RLConfig(mode="packed"))
    options = Mock(model=Mock(use_peft=adapters))
    assert usual_learning_rate(model, options) == rate


def test_weights_without_a_size_give_no_learning_rate():
    with pytest.raises(ValueError, match="zero or not loaded yet, so name a --learning_rate"):
        usual_learning_rate(make_model().to("meta"), Mock())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a model: hf-mxfp4 train MODEL"),
        (["model"], "name problems: --dataset FILE"),
    ],
)
def test_what_is_missing_is_named(words, message):
    result = run("train", *words)
    assert result.exit_code == 1
    assert message in str(result.exception or result.output)


def test_the_folder_has_the_name_of_the_model():
    words, smoke = train.words_for_grpo(["some/model", "--task=gsm8k"])
    assert smoke is None
    assert words[-2:] == ["--output_dir", str(Path("outputs/train/model"))]
