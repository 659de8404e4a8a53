# SPDX-License-Identifier: Apache-2.0
"""gpt-oss from OpenAI's format through the recipes of its config files to merged checkpoints, on a small model; and
Harmony, its chat format."""

import pytest
import torch
from peft import PeftModel
from tiny_models import make_model, make_tokenizer, save_openai
from transformers import AutoModelForCausalLM, Mxfp4Config
from trl.chat_template_utils import gptoss_chat_template, gptoss_template

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import export, import_checkpoint
from hf_mxfp4.recipes import grpo, sft
from hf_mxfp4.recipes.common.checkpoints import load_tokenizer, load_whole, read_stored
from hf_mxfp4.recipes.evaluation.generate import Batch, complete_batches, tokenize


pytestmark = pytest.mark.usefixtures("blank_pictures", "dense_products")
CHAT = [{"role": "user", "content": "6 * 12?"}]
IDS = torch.arange(2, 42).view(2, 20)
REWARD = "def even(completions, completion_ids, **kwargs):\n    return [sum(ids) % 2.0 for ids in completion_ids]\n"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """An imported checkpoint of OpenAI's format, with a tokenizer that knows Harmony."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    tokenizer = make_tokenizer("gpt-4o")
    marks = [f"<|{name}|>" for name in ("start", "message", "channel", "end", "call", "return")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "eos_token": "<|return|>"})
    tokenizer.chat_template = gptoss_chat_template
    window = {"sliding_window": 16, "max_position_embeddings": 4096}
    save_openai(folder / "openai", layers=2, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **window)
    tokenizer.save_pretrained(folder / "openai")
    import_checkpoint(folder / "openai", folder / "packed")
    return folder / "packed"


def run(recipe, config, packed, folder, *options):
    """Two steps of a recipe by its config file, on the CPU and on problems of a line each."""
    problem = '{"question": "6 * 12?", "answer": "6 * 12 = 72\\n#### 72"}\n'
    (folder / "problems.jsonl").write_text(8 * problem)
    files = [f"--{name}={folder / 'problems.jsonl'}" for name in ("dataset", "eval_dataset")]
    small = "--max_steps=2 --gradient_accumulation_steps=1 --learning_rate=0.05 --use_cpu=true --bf16=false".split()
    where = [f"--model_name_or_path={packed}", f"--output_dir={folder / 'out'}"]
    return recipe.main(["--config", config, *files, *small, *where, *options])


def is_trained(model) -> bool:
    """Whether adapters on attention and on experts have moved, in the first layer."""
    factors = {name: p for name, p in model.named_parameters() if "layers.0" in name and "lora_B" in name}
    assert len(factors) == 4 + 2
    return all(p.any() for p in factors.values())


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def test_grpo_and_back_to_mxfp4_and_nvfp4(packed, tmp_path):
    (tmp_path / "even.py").write_text(REWARD)
    options = ["--per_device_train_batch_size=4", "--num_generations=4", "--max_completion_length=8", "--evaluate_n=2"]
    reward = f"--reward={tmp_path / 'even.py'}:even"
    summary = run(grpo, "gpt_oss_20b_lora", packed, tmp_path, *options, reward)
    assert summary["n_quantized"] == 16
    assert summary["reloaded"] == {"compared": 2, "identical": 2}
    base = AutoModelForCausalLM.from_pretrained(packed)
    before = logits(base)
    model = PeftModel.from_pretrained(base, tmp_path / "out/policy")
    assert is_trained(model)
    merged = model.merge_and_unload()
    expected = logits(merged)
    assert not torch.equal(expected, before)
    merged.save_pretrained(tmp_path / "merged")
    for format in ("gpt-oss", "nvfp4-modelopt"):
        report = export(tmp_path / "merged", tmp_path / format, format)
        assert report.counts() == {"kept": 16}
        assert not report.changed
        import_checkpoint(tmp_path / format, tmp_path / f"{format}-back")
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / f"{format}-back")), expected)
    options = {"quantization_config": Mxfp4Config(dequantize=True)}
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "gpt-oss", **options))
    # Other products of the same weights. Sums in another order round a number of bfloat16 to its neighbour, in few
    # places of two layers; the training moved logits by as much as the largest of them.
    tolerance = 2**-7 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert (before - expected).abs().max() > 50 * tolerance


def test_the_format_of_openai_is_to_be_imported_first(packed):
    stored = read_stored(str(packed.parent / "openai"))
    with pytest.raises(ValueError, match="openai is quantized by 'mxfp4'; import it first"):
        load_whole(stored, MXFP4RLConfig())


def test_sft(packed, tmp_path):
    summary = run(sft, "sft_gpt_oss_20b", packed, tmp_path, "--evaluate_n=2", "--save_strategy=no")
    assert summary["after"]["gsm8k"]["loss"] < summary["before"]["gsm8k"]["loss"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(packed), tmp_path / "out/policy")
    assert is_trained(model)


ANALYSIS = "<|channel|>analysis<|message|>#### 5<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>6 * 12 is\n#### 72<|return|>"


@pytest.mark.parametrize(("written", "text"), [(ANALYSIS + FINAL, "6 * 12 is\n#### 72"), (ANALYSIS, "")])
def test_the_answer_is_what_the_final_channel_says(written, text, packed, monkeypatch):
    tokenizer = load_tokenizer(read_stored(str(packed)))
    assert tokenizer.response_template == gptoss_template
    model = make_model("gpt_oss", layers=1)
    seen = []

    def generate(input_ids, **options):
        seen.append(tokenizer.decode(input_ids[0]))
        return torch.cat([input_ids, torch.tensor([tokenizer.encode(written)])], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    options = {"max_new_tokens": 64, "chat_template_kwargs": {"reasoning_effort": "low"}}
    rows = {"prompt": [CHAT], "answer": ["72"]}
    ((found,),) = complete_batches(model, tokenizer, rows, {}, [Batch((0,))], **options)
    assert found.completion == text
    assert "Reasoning: low" in seen[0]
    assert seen[0].endswith("6 * 12?<|end|><|start|>assistant")
    assert "Reasoning: medium" in tokenizer.decode(tokenize(tokenizer, [CHAT])["input_ids"][0])
