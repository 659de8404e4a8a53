# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM computes what transformers does from the same packed folder; writes
`benchmarks/results/vllm_agreement.json`.

    .venv-vllm/bin/python -m benchmarks.vllm_agreement --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl

Log-probabilities of the tokens of some texts, in float32, by both; beside them by transformers twice, once with what
enters attention's last projection changed by a last bit, as another order of summation changes it: where inputs are
quantized, one that lies at the edge of the grid falls to the other side, and what follows is quantized otherwise.
`make test-vllm` makes the environment. Each scheme is measured in a process of its own.
"""

import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4RLConfig

from .macro_factors import FACTORS, FACTORS_OF
from .records import made, option_parser, write


#: By preset and outlier fallback of weights.
SCHEMES = {
    "w4a16": {"preset": "w4a16", **FACTORS},
    "w4a16, outlier fallback": {"preset": "w4a16", **FACTORS_OF},
    "w4a4": {"preset": "w4a4", **FACTORS},
}
#: Standard deviation of what is added to a number, as a part of it.
LAST_BIT = 2.0**-24

ENGINE = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "skip_tokenizer_init": True}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
ENVIRONMENT |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def by_transformers(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of all tokens but the first of each prompt."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1))
    return torch.cat(found)


def by_vllm(folder: str, prompts: list[list[int]]) -> torch.Tensor:
    """The same by vLLM."""
    import vllm

    llm = vllm.LLM(folder, max_model_len=1 + max(map(len, prompts)), **ENGINE)
    options = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
    found = [
        chosen[token].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for token, chosen in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return torch.tensor(found)


def with_other_last_bits(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    """[`by_transformers`], with what enters the last projection of each attention changed in its last bit."""
    generator = torch.Generator().manual_seed(0)

    def change(module, arguments):
        (x,) = arguments
        return (x * (1 + LAST_BIT * torch.randn(x.shape, generator=generator)),)

    projections = [module for name, module in model.named_modules() if name.endswith("self_attn.o_proj")]
    if not projections:
        raise ValueError("the model has no self_attn.o_proj")
    hooks = [module.register_forward_pre_hook(change) for module in projections]
    try:
        return by_transformers(model, prompts)
    finally:
        for hook in hooks:
            hook.remove()


def differences(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """How far apart log-probabilities are."""
    size = (found - expected).abs()
    return {
        "median": size.median().item(),
        "mean": size.mean().item(),
        "max": size.max().item(),
        "beyond_1e-3": (size > 1e-3).float().mean().item(),
    }


def measure(name: str, checkpoint: str, prompts: list[list[int]], out: str) -> None:
    """Write what was measured of one scheme to a file."""
    os.environ.update(ENVIRONMENT)
    config = MXFP4RLConfig(mode="packed", **SCHEMES[name])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    unquantized = by_transformers(model, prompts)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, quantization_config=config).eval()
    expected, changed = by_transformers(model, prompts), with_other_last_bits(model, prompts)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = by_vllm(folder, prompts)
    record = {
        "scheme": name,
        "tokens": len(expected),
        "vllm": differences(found, expected),
        "last_bits": differences(changed, expected),
        "quantization": differences(expected, unquantized),
    }
    Path(out).write_text(json.dumps(record))


def in_short(model: str, record: dict[str, Any]) -> dict[str, Any]:
    """What all records say: the mean difference from vLLM, beside that of other last bits."""
    value, baseline = record["vllm"]["mean"], record["last_bits"]["mean"]
    return {
        "name": f"{model}, {record['scheme']}: mean difference of a log-probability",
        "model": model,
        "shape": [record["tokens"]],
        "value": value,
        "unit": "nats",
        "baseline": baseline,
        "ratio": value / baseline,
        "ceiling_fraction": None,
    }


def main() -> None:
    parser = option_parser(__doc__, "vllm_agreement")
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="GSM8K, as JSON lines")
    parser.add_argument("--texts", type=int, default=16, help="how many of them")
    parser.add_argument("--length", type=int, default=120, help="tokens of each, at most")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in args.text.read_text().splitlines()[: args.texts]]
    prompts = [tokenizer(f"{row['question']} {row['answer']}")["input_ids"][: args.length] for row in rows]
    found = []
    for name in SCHEMES:
        with tempfile.NamedTemporaryFile() as out:
            process = multiprocessing.get_context("spawn").Process(
                target=measure, args=(name, args.model, prompts, out.name)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise RuntimeError(f"{name} ended with {process.exitcode}")
            record = json.loads(Path(out.name).read_text())
        print(json.dumps(record))
        model = Path(args.model).name
        command = f".venv-vllm/bin/python -m benchmarks.vllm_agreement --model {model} --text gsm8k/test.jsonl"
        summary = in_short(model, record)
        found.append(summary | record | made(command, ("torch", "transformers", "vllm", "vllm-cpu")))
    write(found, args.out)


if __name__ == "__main__":
    main()
