# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_mxfp4.recipes.post_training.arguments import parse
from hf_mxfp4.recipes.sft import DEMO, GROUPS, main
from hf_mxfp4.rl.config import count_quantized


TINY = [
    "--tiny_hidden_size=32", "--tiny_num_layers=2", "--n_train=64", "--per_device_train_batch_size=8", "--max_steps=4",
    "--eval_steps=2", "--eval_samples=16", "--logging_steps=1", "--learning_rate=.01",
]  # fmt: skip
IDS = torch.arange(2, 14).view(2, 6)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the demo, smaller, with a checkpoint in the middle: its folder and summary."""
    out = tmp_path_factory.mktemp("sft") / "out"
    return out, main([*TINY, f"--output_dir={out}", "--save_strategy=steps", "--save_steps=2"])


def test_the_demo_learns_and_is_measured(run):
    out, summary = run
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["steps"] == 4 and summary["n_quantized"] == 14
    history = json.loads((out / "log_history.json").read_text())
    losses = {entry["step"]: entry["eval_arithmetic_loss"] for entry in history if "eval_arithmetic_loss" in entry}
    assert list(losses) == [0, 2, 4] and losses[4] == summary["after"]["arithmetic"]["loss"]
    assert losses[0] == summary["before"]["arithmetic"]["loss"] > losses[4] + 0.1
    assert count_quantized(AutoModelForCausalLM.from_pretrained(out / "policy")) == 14


def test_a_resumed_run_ends_with_the_same_weights(run, tmp_path):
    out, summary = run
    expected = logits(AutoModelForCausalLM.from_pretrained(out / "policy"))
    again = main([*TINY, f"--output_dir={out}", f"--resume_from_checkpoint={out}/checkpoint-2"])
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out / "policy")), expected)


def test_what_is_learned_ends_with_the_end_of_sequence(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.recipes.sft.TextRun.train", lambda run, trainer, *others: trainer)
    trainer = main([*TINY, f"--output_dir={tmp_path}/out"])
    row, eos = trainer.train_dataset[0], trainer.processing_class.eos_token_id
    assert row["input_ids"][-1] == row["labels"][-1] == eos and row["labels"][0] == -100


def test_adapters_on_packed_weights_learn_texts_of_the_user(run, tmp_path):
    base, file, out = run[0] / "base", tmp_path / "sums.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps({"text": f"{i}+{i}={2 * i}"}) + "\n" for i in range(20)))
    words = [f"--text={file}", "--text_field=text", f"--eval_text={file}", f"--model_name_or_path={base}"]
    words += ["--mode=packed", "--use_peft=true", "--lora_target_modules=all-linear", f"--output_dir={out}"]
    summary = main([*words, "--use_cpu=true", "--bf16=false", "--max_steps=2", "--save_strategy=no", "--dtype=float32"])
    assert summary["after"].keys() == {"sums"} and summary["n_quantized"] == 14
    packed = AutoModelForCausalLM.from_pretrained(run[0] / "base", quantization_config=parsed(words).quantization)
    before = logits(packed)
    assert not torch.equal(logits(PeftModel.from_pretrained(packed, out / "policy")), before)


def parsed(words):
    return parse([*words, "--use_cpu=true"], GROUPS, DEMO)


@pytest.mark.parametrize("config", sorted(DEMO.parent.glob("sft_*.yaml")), ids=lambda path: path.stem)
def test_configurations_are_read(config):
    assert parsed(["--config", str(config), "--bf16=false"]).recipe.learn in ("text", "completion")


def test_what_is_wrong_ends_with_a_message(tmp_path):
    with pytest.raises(SystemExit, match="learn='generated' must be one of text, completion"):
        main([*TINY, f"--output_dir={tmp_path / 'a'}", "--learn=generated"])
    with pytest.raises(SystemExit, match="matches no layer of Qwen2ForCausalLM"):
        main([*TINY, f"--output_dir={tmp_path / 'b'}", "--modules_to_not_convert", "re:.*"])
    file = Path(tmp_path / "used" / "file")
    file.parent.mkdir()
    file.touch()
    with pytest.raises(SystemExit, match="is not empty"):
        main([*TINY, f"--output_dir={file.parent}"])
