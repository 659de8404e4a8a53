# SPDX-License-Identifier: Apache-2.0
"""Options of `evaluate.py`."""

from dataclasses import dataclass
from typing import ClassVar

from hf_mxfp4.recipes.common.options import build, merge_options, read_file, read_words, read_yaml, refuse_words
from hf_mxfp4.recipes.tasks import TaskArguments
from hf_mxfp4.utils import option


#: What `--dequantize` can leave out of the scheme; neither control quantizes activations.
CONTROLS = {
    "masters": "full precision on the master weights",
    "quantized": "full precision on the dequantized weights",
}


@dataclass
class EvaluationArguments(TaskArguments):
    """Accuracy and pass@k of a policy under its own quantization scheme, with confidence intervals."""

    DEFAULT_TASK: ClassVar[str] = "gsm8k"

    model: str | None = option(
        None,
        "Folder or Hub id of a policy, packed weights, an adapter or a plain model; or a result.json to "
        "--compare. The word --model may be left out.",
    )
    dequantize: str | None = option(
        None,
        "A control in place of the policy's own scheme: 'masters' (when no word follows) computes in full "
        "precision on the master weights; 'quantized' in full precision on the dequantized weights.",
        nargs="?",
        const="masters",
        choices=list(CONTROLS),
    )
    dtype: str = option("auto", "Of weights; auto: as stored.", choices=["auto", "float32", "bfloat16", "float16"])
    base: str | None = option(None, "Base of an adapter, instead of the one that it names.")
    revision: str | None = option(None, "Branch, tag or commit of a model on the Hub.")
    attn_implementation: str | None = option(None, "As in from_pretrained.")
    trust_remote_code: bool = option(False, "Run the model's own code.")
    use_cpu: bool = option(False, "Leave GPUs alone.")

    chat_template_kwargs: str | None = option(None, "Of the chat template: '{reasoning_effort: low}'.")
    samples: int = option(0, "Sampled completions of each problem, for pass@k; 0: greedy only.")
    k: str | None = option(None, "The k of pass@k, such as 1,4,16; default: 1 and --samples.")
    temperature: float = option(1.0, "Of sampling.")
    seed: int = option(0, "Of sampling and of bootstrap intervals.")
    max_new_tokens: int | None = option(None, "Longest completion; default: the task's.")
    batch_size: int = option(64, "Prompts in a batch.")

    output_dir: str | None = option(None, "Of *.jsonl and result.json; default: outputs/evaluation/<model>/<task>.")
    overwrite: bool = option(False, "Start again instead of going on with the completions that are there.")
    compare: str | None = option(None, "result.json of another evaluation of the same problems.")

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("samples", 0), ("batch_size", 1), ("max_new_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} {value} must be at least {least}")
        self.chat_template_kwargs = read_yaml("chat_template_kwargs", self.chat_template_kwargs)
        if self.reward is not None:
            raise ValueError("--reward is for training; an evaluation reports scores")
        if self.temperature <= 0:
            raise ValueError(f"--temperature {self.temperature} must be above 0; greedy completions need none")
        if self.k and (not self.ks or not 1 <= self.ks[0] <= self.ks[-1] <= self.samples):
            raise ValueError(f"--k {self.k} must be whole numbers such as 1,4,16, from 1 to --samples {self.samples}")

    @property
    def ks(self) -> list[int]:
        """The k of pass@k; empty for words that are no numbers."""
        if self.k is None:
            if not self.samples:
                return []
            return sorted({1, self.samples})
        words = str(self.k).split(",")
        if not all(word.strip().isdigit() for word in words):
            return []
        return sorted({int(word) for word in words})


#: Everything that has options of `evaluate.py`.
GROUPS = (EvaluationArguments,)


def parse(argv: list[str]) -> EvaluationArguments:
    """Parse and check the command line. Raises `ValueError` for what is wrong."""
    given, words = read_words(argv, GROUPS, usage="evaluate.py MODEL [--option value ...]")
    if words and not words[0].startswith("--") and "model" not in given:
        given["model"] = words.pop(0)
    refuse_words(words, GROUPS)
    path = given.pop("config", None)
    if path is not None:
        given = merge_options(read_file(path, GROUPS), given)
    (options,) = build(GROUPS, given)
    if options.model is None:
        raise ValueError("name a model, such as outputs/tiny_cpu/policy")
    return options
