# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4DistillationConfig
from hf_mxfp4.rl.config import count_quantized
from recipes.distill import DEMO, main, of_task
from recipes.post_training.arguments import DistillArguments, parse


pytestmark = pytest.mark.usefixtures("blank_pictures")
CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
TINY = [
    "--sft_steps=3", "--sft_batch_size=8", "--tiny_hidden_size=32", "--tiny_num_layers=2", "--n_train=64",
    "--per_device_train_batch_size=8", "--max_steps=4", "--eval_steps=2", "--eval_samples=16", "--logging_steps=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the demo, smaller, with a checkpoint in the middle: its folder and summary."""
    out = tmp_path_factory.mktemp("distill") / "out"
    return out, main([*TINY, f"--output_dir={out}", "--save_strategy=steps", "--save_steps=2"])


def test_the_demo_is_measured_before_while_and_after(run):
    out, summary = run
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["steps"] == 4 and summary["n_quantized"] == 14 and summary["shared_tensors"] > 0
    assert summary["tokens_distilled"] > 4 * 8 * 4
    history = json.loads((out / "log_history.json").read_text())
    kl = {entry["step"]: entry["eval_arithmetic_kl"] for entry in history if "eval_arithmetic_kl" in entry}
    assert list(kl) == [0, 2, 4] and kl[4] == summary["after"]["arithmetic"]["kl"]
    assert kl[0] == summary["before"]["arithmetic"]["kl"]
    assert "a rise is forgetting" in (out / "run_report.html").read_text()
    assert count_quantized(AutoModelForCausalLM.from_pretrained(out / "student")) == 14


def test_a_resumed_run_ends_with_the_same_numbers(run):
    out, summary = run
    again = main([*TINY, f"--output_dir={out}", f"--resume_from_checkpoint={out}/checkpoint-2", "--save_student=false"])
    assert {**again, "seconds": 0, "saved": 0} == {**summary, "seconds": 0, "saved": 0}


def test_texts_of_the_user_are_learned_from_a_smoothed_or_packed_start(run, tmp_path, capsys):
    out, _ = run
    file, prose = tmp_path / "sums.jsonl", tmp_path / "prose.txt"
    file.write_text("".join(json.dumps({"question": f"{i}+{i}=", "answer": f"{2 * i}"}) + "\n" for i in range(30)))
    prose.write_text("1+1=2" * 40)
    options = [f"--text={file}", "--text_field=question,answer", "--eval_text", str(file), str(prose), "--use_cpu=true"]
    options += ["--bf16=false", "--save_strategy=no", "--report_to=none", "--report_every=0", "--dtype=float32"]
    options += ["--max_length=32", "--max_steps=2"]
    lora = ["--mode=packed", "--use_peft=true", "--lora_target_modules=all-linear", f"--model_name_or_path={out}/base"]
    summary = main([*options, *lora, f"--output_dir={tmp_path / 'lora'}"])
    assert summary["after"].keys() == {"sums", "prose"} and summary["shared_tensors"] > 0
    assert (tmp_path / "lora" / "student" / "adapter_config.json").is_file()
    with pytest.raises(SystemExit, match="the teacher is quantized; name the original"):
        main([*options, f"--model_name_or_path={out}/student", f"--output_dir={tmp_path / 'again'}"])


ROWS = Dataset.from_list([{"prompt": "1+1=", "completion": "2", "answer": "2"}])
CHAT = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}], "completion": "2", "answer": "2"}])


@pytest.mark.parametrize(
    ("rows", "learn", "expected"),
    [
        (ROWS, "text", {"text": "1+1=2"}),
        (CHAT, "text", {"messages": [*CHAT[0]["prompt"], {"role": "assistant", "content": "2"}]}),
        (ROWS, "completion", {"prompt": "1+1=", "completion": "2"}),
        (ROWS, "generated", {"prompt": "1+1="}),
    ],
)
def test_what_is_learned_of_a_task(rows, learn, expected):
    assert of_task(rows, learn)[0] == expected


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("distill_*.yaml")), ids=lambda path: path.stem)
def test_configurations_are_read(config):
    options = parse(["--config", str(config), "--use_cpu=true"], MXFP4DistillationConfig, DistillArguments, DEMO)
    assert options.quantization.mode == "qat" and options.training.beta == 0.0


def test_what_is_wrong_ends_with_a_message(tmp_path):
    with pytest.raises(SystemExit, match="learn='all' must be one of text, completion, generated"):
        main([*TINY, f"--output_dir={tmp_path / 'a'}", "--learn=all"])
    with pytest.raises(SystemExit, match="reload_check"):
        main([*TINY, f"--output_dir={tmp_path / 'b'}", "--reload_check=3"])
