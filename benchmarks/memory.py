# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step by mode.

    python -m benchmarks.memory             # 10 runs of a decoder of 24 million parameters, each in a new process
    python -m benchmarks.memory --out -     # only printed

Each run takes AdamW steps on 4 x 512 random tokens, with the loss of transformers under bfloat16 autocast: one to fill
the optimizer's state, one whose saved tensors are counted, and one of two accumulated passes whose live tensors are.
Gradients of the first pass are there at the peak of the second, as in most runs of RL.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears

from .counters import LiveTensors, SavedTensors, state_bytes
from .records import made, option_parser, write


COMMAND = "python -m benchmarks.memory"
SEQUENCES = 4
TOKENS = 512
RANK = 16
#: Name of a mode to the options of its config; `None` is full precision.
MODES = {
    "full precision": None,
    "w4a8": {},
    "w4a4": {"preset": "w4a4"},
    "w4a4g4": {"preset": "w4a4g4"},
    "packed + LoRA": {"mode": "packed"},
}


def architecture(layers: int = 4, hidden: int = 512) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        tie_word_embeddings=False,
    )


def make_model(
    config: PreTrainedConfig,
    options: dict | None,
    dtype: torch.dtype,
    checkpointing: bool,
    rank: int = RANK,
    targets: str | list[str] = "all-linear",
) -> torch.nn.Module:
    """Return a model of a mode in training, of random weights of ``dtype`` (packed: of those that are not), with
    adapters on ``targets``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if options is not None:
        quantization = MXFP4RLConfig(**options)
        quantize_linears(model, quantization)
        if quantization.mode == "packed":
            from peft import LoraConfig, get_peft_model

            import hf_mxfp4.integrations.peft  # noqa: F401  PEFT learns of packed layers

            model = get_peft_model(model, LoraConfig(r=rank, task_type="CAUSAL_LM", target_modules=targets))
            if checkpointing:
                model.enable_input_require_grads()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def one_pass(model: torch.nn.Module, ids: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", compute, enabled=compute != torch.float32):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


def measure(model: torch.nn.Module, ids: torch.Tensor, compute: torch.dtype, checkpointing: bool) -> dict[str, int]:
    """Bytes of the states, of what is saved for the backward pass, and of the tensors at the peak of a step of two
    accumulated passes."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    one_pass(model, ids, compute).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with SavedTensors(model) as saved:
        loss = one_pass(model, ids, compute)
    loss.backward()
    states = state_bytes(model, optimizer)
    optimizer.zero_grad(set_to_none=True)
    del loss
    held = saved.held_checkpointed if checkpointing else saved.held
    del saved
    existing = [list(model.parameters()), list(model.buffers()), [list(s.values()) for s in optimizer.state.values()]]
    with LiveTensors(existing) as live:
        for _ in range(2):
            one_pass(model, ids, compute).backward()
        optimizer.step()
    return {**states, "saved": held, "peak": live.peak}


def resident(key: str) -> int:
    """Return a line of this process's status in bytes: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def run(mode: str, checkpointing: bool) -> dict[str, int]:
    """One mode, in this process."""
    ids = torch.randint(0, 8192, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
    before = resident("VmRSS")
    dtype = torch.bfloat16 if MODES[mode] == {"mode": "packed"} else torch.float32
    model = make_model(architecture(), MODES[mode], dtype, checkpointing)
    measured = measure(model, ids, torch.bfloat16, checkpointing)
    return {**measured, "process": resident("VmHWM") - before}


def main() -> None:
    parser = option_parser(__doc__, "memory")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "CHECKPOINTING"), help="run one mode and print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one[0], options.one[1] == "on")))
        return
    common = {
        "shape": [SEQUENCES, TOKENS],
        "ceiling_fraction": None,
        **made(COMMAND, ("torch", "transformers")),
    }
    records = []
    for checkpointing in (False, True):
        for mode in MODES:
            word = "on" if checkpointing else "off"
            # A process of its own for each, so that what it held at most is that of the one mode.
            command = [sys.executable, "-m", "benchmarks.memory", "--one", mode, word]
            done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=600)
            if done.returncode:
                raise RuntimeError(f"{mode} failed:\n{done.stderr}")
            measured = json.loads(done.stdout.splitlines()[-1])
            record = {
                "name": f"{mode} / checkpointing {word}",
                "value": measured["peak"],
                "unit": "bytes of tensors at the peak of a step",
                "baseline": None,
                "ratio": None,
                "measured": measured,
            }
            records.append({**record, **common})
            print(record["name"], measured)
    write(records, options.out)


if __name__ == "__main__":
    main()
