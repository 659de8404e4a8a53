# SPDX-License-Identifier: Apache-2.0
"""The command line of `evaluate.py`."""

import argparse
import inspect
from pathlib import Path
from typing import NoReturn

import yaml

from hf_mxfp4.suggestions import unknown_key_message
from recipes.common.options import bare_flags
from recipes.tasks import TASKS, load_task
from recipes.tasks.file import SCORES

from .policy import CONTROLS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SystemExit(f"error: {message}")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults where they say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parsed and checked options; leaves with a message when they are wrong."""
    parser = _build()
    flags = [name for action in parser._actions if action.nargs == 0 for name in action.option_strings]
    options, unknown = parser.parse_known_args(bare_flags(argv, flags))
    names = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    for word in unknown:
        if word.startswith("--"):
            name = word[2:].split("=")[0]
            message = unknown_key_message("the command line", name, [known[2:] for known in names])
            parser.error(message)
        parser.error(f"there is one model, and {word!r} is one word more")
    _check(parser, options)
    return options


def _build() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="evaluate.py",
        description="Accuracy and pass@k of a policy under its own quantization scheme, with confidence intervals.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        help="folder or Hub id of a policy, packed weights, an adapter or a plain model; or a result.json to --compare",
    )
    add("--task", default="gsm8k", help=f"one of {', '.join(TASKS)}")

    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--dequantize", nargs="?", const="masters", choices=list(CONTROLS),
        help="a control in place of the policy's own scheme: 'masters' (when no word follows) computes in full "
        "precision on the master weights; 'quantized' in full precision on the dequantized weights",
    )  # fmt: skip
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of weights; auto: as stored",
    )
    add("--base", help="base of an adapter, instead of the one that it names")
    add("--revision", help="branch, tag or commit of a model on the Hub")
    add("--attn_implementation", help="as in from_pretrained")
    add("--trust_remote_code", action="store_true", help="run the model's own code")
    add("--use_cpu", action="store_true", help="leave GPUs alone")

    group = parser.add_argument_group("problems")
    add = group.add_argument
    add("--test_file", help="JSON lines to evaluate on instead of the Hub's dataset")
    add("--dataset_name", help="dataset on the Hub in the task's format")
    add("--dataset_config", help="its configuration")
    add("--prompt_column", help="task file: column of the prompts (prompt)")
    add("--answer_column", help="task file: column of the answers (answer)")
    add("--score", help=f"task file: {', '.join(SCORES)} or FILE.py:function, called as f(completion, answer)")
    add(
        "--reward",
        help="FILE.py:function of training, called as f(completions, answer, **kwargs); its mean is reported",
    )
    add("--prompt_template", help="prompt text with the field {question}")
    add("--conversational", action="store_true", help="send prompts through the chat template; otherwise as plain text")
    add("--limit", type=int, help="evaluate on so many problems, drawn by --data_seed; default: all")
    add("--data_seed", type=int, default=0, help="of that draw, and of generated problems (as in training)")

    add(
        "--task_options",
        type=_mapping,
        default={},
        metavar="YAML",
        help="other options of the task, as it was loaded in training, such as '{problem_count: 2000}'",
    )

    group = parser.add_argument_group("completions")
    add = group.add_argument
    add("--samples", type=int, default=0, help="sampled completions of each problem, for pass@k; 0: greedy alone")
    add("--no_greedy", action="store_true", help="leave out the greedy completions")
    add("--k", help="the k of pass@k, such as 1,4,16; default: 1 and --samples")
    add("--temperature", type=float, default=1.0, help="of sampling")
    add("--top_p", type=float, default=1.0, help="of sampling")
    add("--seed", type=int, default=0, help="of sampling and of bootstrap intervals")
    add("--max_new_tokens", type=int, help="longest completion; default: the task's")
    add("--batch_size", type=int, default=64, help="prompts in a batch")
    add("--no_weight_cache", action="store_true", help="quantize weights at each use: less memory, more time")

    group = parser.add_argument_group("results")
    add = group.add_argument
    add(
        "--output_dir",
        type=Path,
        help="of greedy.jsonl, samples.jsonl and result.json; default: outputs/evaluation/<model>/<task>",
    )
    add("--overwrite", action="store_true", help="start again instead of going on with the completions that are there")
    add("--compare", type=Path, metavar="RESULT", help="result.json of another evaluation of the same problems")
    return parser


def _mapping(text: str) -> dict:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither YAML nor JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no mapping, such as '{{problem_count: 2000}}'")
    return found


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name, least in (("samples", 0), ("batch_size", 1), ("max_new_tokens", 1), ("limit", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value} must be at least {least}")
    known = [name for name in inspect.signature(load_task).parameters if name != "name"]
    for name in options.task_options:
        if name not in known:
            parser.error(unknown_key_message("--task_options", str(name), known))
    if options.no_greedy and options.samples == 0:
        parser.error("--no_greedy leaves nothing to do without --samples")
    if options.temperature <= 0:
        parser.error(f"--temperature {options.temperature} must be above 0; greedy completions need no temperature")
    if not 0 < options.top_p <= 1:
        parser.error(f"--top_p {options.top_p} must be above 0 and at most 1")
    if options.k is None:
        options.k = sorted({1, options.samples}) if options.samples else []
        return
    try:
        options.k = sorted({int(word) for word in options.k.split(",")})
    except ValueError:
        parser.error(f"--k {options.k} must be whole numbers with commas between them, such as 1,4,16")
    if not 1 <= options.k[0] <= options.k[-1] <= options.samples:
        parser.error(f"--k {','.join(map(str, options.k))} needs 1 <= k <= --samples, which is {options.samples}")
