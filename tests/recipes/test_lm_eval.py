# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness under `hf-mxfp4 run`: likelihoods and completions of our checkpoints are those that
`hf-mxfp4 eval` and `recipes/evaluate.py` measure. Skipped where it is not installed; checked with 0.4.13."""

import json

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import TEXT, make_model, make_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.cli import app
from hf_mxfp4.lab.evaluation.scoring import score
from hf_mxfp4.recipes.evaluation.generate import Batch, complete_batches


pytest.importorskip("lm_eval")

TASKS = {
    "texts": {"output_type": "loglikelihood_rolling", "metric_list": [{"metric": "byte_perplexity"}]},
    "answers": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}
FIELDS = {"texts": ("", "{{text}}"), "answers": ("{{text}}", "{{text}}")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints in folders "qat", "packed" and "adapter", and tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    tokenizer = make_tokenizer("qwen2")
    # To which transformers adds "<|endoftext|>"; under an adapter lm_eval resizes embeddings to its length.
    make_model(vocab_size=len(tokenizer) + 1, max_position_embeddings=256).save_pretrained(folder / "base")
    for mode in ("qat", "packed"):
        model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=MXFP4RLConfig(mode=mode))
        model.save_pretrained(folder / mode)
        tokenizer.save_pretrained(folder / mode)
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    for name, task in TASKS.items():
        prompt, target = FIELDS[name]
        data = {"data_files": {"test": str(folder / "texts.jsonl")}, "cache_dir": str(folder / "cache")}
        task |= {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        task |= {"doc_to_text": prompt, "doc_to_target": target, "target_delimiter": ""}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def measured(folder, out, arguments):
    """What lm_eval found of each text: its log-likelihood, and its continuation."""
    command = f"run -- lm_eval run --model hf --model_args {arguments} --tasks texts,answers --include_path {folder}"
    command += f" --device cpu --batch_size 2 --log_samples --output_path {out}"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    rows = {}
    for name in TASKS:
        path = next(out.glob(f"*/samples_{name}_*.jsonl"))
        found = {row["doc_id"]: row["resps"][0][0] for row in map(json.loads, path.read_text().splitlines())}
        rows[name] = [found[i] for i in range(len(TEXT))]
    return rows


@pytest.mark.parametrize("name", ["qat", "packed", "adapter"])
def test_likelihoods_and_completions_are_ours(folder, name, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_mxfp4.cli.training._LAUNCHERS", {})  # as nothing is launched
    weights = folder / ("packed" if name == "adapter" else name)
    rows = measured(folder, tmp_path, f"pretrained={weights}" + (f",peft={folder / name}" if name == "adapter" else ""))
    tokenizer = make_tokenizer("qwen2")
    model = AutoModelForCausalLM.from_pretrained(weights)
    if name == "adapter":
        model = PeftModel.from_pretrained(model, folder / name)
    first = tokenizer.bos_token_id or tokenizer.eos_token_id  # lm_eval puts it before each text
    batches = [torch.tensor([[first, *tokenizer(text).input_ids]]) for text in TEXT]
    assert [-float(found) for found in rows["texts"]] == pytest.approx(
        [s.nll for s in score(model, None, batches)], 1e-5
    )
    problems = Dataset.from_dict({"prompt": TEXT, "answer": TEXT})
    (ours,) = complete_batches(model, tokenizer, problems, {}, [Batch((0, 1))], max_new_tokens=8)
    assert rows["answers"] == [one.completion for one in ours]
    assert any(rows["answers"])
