# SPDX-License-Identifier: Apache-2.0
"""Train a model in 4 bits on problems of your own, by GRPO: one command from a checkpoint to a packed policy.

    hf-mxfp4 train MODEL --dataset problems.jsonl --reward mine.py:reward [--use_peft true] [--distill_steps N]
    accelerate launch recipes/train.py MODEL --dataset problems.jsonl --reward mine.py:reward

It is `grpo.py` with `w4a8.yaml`, and takes all of its options. Adapters (`--use_peft true`) train on packed weights.
`--smoke` does everything in a few steps, to see that it works on this machine; what it measures means nothing.
"""

if __name__ == "__main__" and not __package__:
    import from_root  # noqa: F401  the root in place of this folder

import re
import sys
from pathlib import Path
from typing import Any

from hf_mxfp4.recipes import grpo
from hf_mxfp4.recipes.common.options import exit_on_wrong_options, read_command
from hf_mxfp4.recipes.common.reporting import shutdown, tell
from hf_mxfp4.recipes.post_training.arguments import GROUPS


#: The YAML file of options, unless `--config` names another one.
CONFIG = "w4a8"
#: Options of a smoke run; a smaller number on the command line wins.
SMOKE = {
    "max_steps": 3,
    "distill_steps": 2,
    "evaluate_n": 8,
    "max_completion_length": 16,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
}
SMOKE_STUDY = "{n_train: 16, greedy_batch_size: 8, reload_check: 8}"
#: A file in the folder of a smoke run. The next smoke run may write over such a folder.
MARK = "smoke_run.txt"
_NOTHING = "a smoke run: it shows that everything works on this machine, and its numbers mean nothing"


def main(argv: list[str]) -> dict[str, Any]:
    """Run the recipe; return its summary."""
    words, smoke_folder = exit_on_wrong_options(words_for_grpo, argv)
    if smoke_folder is None:
        return grpo.main(words)
    tell("smoke", _NOTHING)
    smoke_folder.mkdir(parents=True, exist_ok=True)
    (smoke_folder / MARK).write_text(f"{_NOTHING}\n")
    summary = grpo.main(words)
    tell("smoke", f"done: {_NOTHING}")
    return summary


def words_for_grpo(argv: list[str]) -> tuple[list[str], Path | None]:
    """Return the words for `grpo.py` that a command line stands for, and the folder of a smoke run. Raises `ValueError`
    for what is wrong or missing."""
    is_smoke = "--smoke" in argv
    words = [word for word in argv if word != "--smoke"]
    if words and not words[0].startswith("--"):
        words.insert(0, "--model_name_or_path")
    named = read_command(words, GROUPS)
    if "model_name_or_path" not in named:
        raise ValueError("name a model: hf-mxfp4 train MODEL --dataset FILE --reward FILE.py:function")
    if not {"task", "dataset", "config"} & set(named):
        if not is_smoke:
            raise ValueError("name problems: --dataset FILE (JSON lines with prompt and answer), or a --task")
        words += ["--task", "few_shot"]
    if "config" not in named:
        words += ["--config", CONFIG]
    if named.get("use_peft") and "mode" not in named:
        words += ["--mode", "packed"]
    model = re.sub(r"[^\w.-]+", "-", Path(named["model_name_or_path"]).name)
    folder = Path(named.get("output_dir", f"outputs/train/{model}"))
    if not is_smoke:
        return [*words, "--output_dir", str(folder)], None
    folder = folder.with_name(f"{folder.name}-smoke")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ValueError(f"{folder} holds something else than a smoke run; choose another --output_dir")
    for option, value in SMOKE.items():
        asked = named.get(option)
        words += [f"--{option}", str(value if asked is None else min(value, asked))]
    words += ["--study", SMOKE_STUDY, "--save_strategy", "no"]
    return [*words, "--output_dir", str(folder), "--overwrite", "true"], folder


if __name__ == "__main__":
    main(sys.argv[1:])
    shutdown()
