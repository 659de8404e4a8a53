# SPDX-License-Identifier: Apache-2.0
"""Count Python calls, depth and files of the project from a call to the arithmetic, in its main flows.

    python -m benchmarks.call_counts [--only NAME ...]

Counted by `sys.setprofile` are calls of Python functions that are defined in this repository. ``calls`` is their
number, ``depth`` how many of them are at most inside of one another, ``files`` how many files they are in, ``frames``
the calls of all Python functions, those of PyTorch included, and ``us`` the fastest of 200 calls in microseconds, for
layers. Layers have the default scheme. Each flow runs once before it is counted. The flows use public names, so that
the script also measures other versions of the project.

Flows:
    eager     the forward pass of one `MXFP4Linear` without gradients, on the eager reference
    cpu       the same, on the fused C++ of the CPU
    kept      the same within `cached_weights()`, as in rollouts
    packed    the forward pass of one `MXFP4PackedLinear`
    train     the forward and the backward pass, on the fused C++ of the CPU
    triton    the forward pass on the Triton kernels, whose launches do nothing: what is in front of a kernel
    experts   the forward pass of `MXFP4Experts`, two projections, on the fused C++ of the CPU
    weight    a checkpoint through `from_pretrained`, and packed to disk
    trainer   one step of `MXFP4GRPOTrainer`: from prompts to a gradient
    rollout   one rollout of it: completions, rewards and log-probabilities, by the code above the layers
"""

import argparse
import contextlib
import os
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch


Flow = Callable[[], Any]


class Counter:
    """Calls of Python functions defined below some folders, while it is entered.

    Attributes:
        calls: how many there were.
        frames: those of all Python functions.
        depth: the most that were inside of one another.
        files: those that the functions are in.
    """

    def __init__(self, folders: tuple[str, ...]):
        self.folders = folders
        self.calls = self.frames = self.depth = self._now = 0
        self.files: set[str] = set()

    def __enter__(self) -> "Counter":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _event(self, frame: Any, event: str, _: Any) -> None:
        self.frames += event == "call"
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(self.folders):
            return
        if event == "return":
            self._now -= 1
            return
        self.calls += 1
        self._now += 1
        self.depth = max(self.depth, self._now)
        self.files.add(frame.f_code.co_filename)


def counted(flow: Flow, parts: tuple[str, ...] = ("",), warm: bool = True) -> Counter:
    """Return what a flow calls in these parts of the package, its second time (its first without ``warm``)."""
    import hf_mxfp4
    import mxfp4_kernels

    roots = [Path(module.__file__).parent for module in (hf_mxfp4, mxfp4_kernels)]
    folders = tuple(f"{root}{os.sep}{part}" for root in roots for part in parts)
    if warm:
        flow()
    with Counter(folders) as counter:
        flow()
    return counter


def linear(backend: str) -> Any:
    """Return a layer and a batch for it."""
    from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig

    torch.manual_seed(0)
    config = MXFP4RLConfig(backend=backend)
    return MXFP4Linear.from_linear(torch.nn.Linear(256, 128), config, "layer"), torch.randn(8, 256)


def forward(stack: ExitStack, backend: str) -> Flow:
    """Return the forward pass of a linear layer without gradients."""
    stack.enter_context(torch.no_grad())
    layer, x = linear(backend)
    return lambda: layer(x)


def to_kernels(stack: ExitStack) -> Flow:
    """Return the forward pass of a linear layer up to the launches of kernels."""
    stack.enter_context(without_kernels())
    return forward(stack, "triton")


def kept(stack: ExitStack) -> Flow:
    """Return the forward pass of a linear layer without gradients whose weight is cached."""
    from hf_mxfp4 import cached_weights

    layer, x = linear("cpu")
    stack.enter_context(cached_weights(layer))
    stack.enter_context(torch.no_grad())
    return lambda: layer(x)


def packed(stack: ExitStack) -> Flow:
    """Return the forward pass of a packed layer."""
    from hf_mxfp4 import MXFP4PackedLinear, MXFP4RLConfig

    torch.manual_seed(0)
    config = MXFP4RLConfig(mode="packed", preset="w4a16")
    layer = MXFP4PackedLinear.from_linear(torch.nn.Linear(256, 128), config, "layer")
    x = torch.randn(8, 256)
    stack.enter_context(torch.no_grad())
    return lambda: layer(x)


def train() -> Flow:
    """Return the forward and the backward pass of a linear layer."""
    layer, x = linear("cpu")
    x.requires_grad_()
    return lambda: layer(x).sum().backward()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Make launches of Triton kernels do nothing: outputs are nonsense, on a way that is as long."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__
    GridExecutor.__call__ = lambda *_, **__: None
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


def experts() -> Flow:
    """Return the forward pass of four experts, two for each of eight tokens."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig

    torch.manual_seed(0)
    plain = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=64, num_experts=4))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    layer = MXFP4Experts.from_experts(plain, MXFP4RLConfig(backend="cpu"), "experts")
    x = torch.randn(8, 64)
    ids = torch.randint(4, (8, 2))
    return lambda: layer(x, ids, torch.ones(8, 2))


def tiny_model(folder: Path) -> Path:
    """Return a saved model of two layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


def weight(stack: ExitStack) -> Flow:
    """Return how a checkpoint of 14 matrices is loaded, packed and saved."""
    from transformers import AutoModelForCausalLM

    from hf_mxfp4 import MXFP4RLConfig

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    source = tiny_model(folder)

    def flow() -> None:
        config = MXFP4RLConfig(mode="packed")
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
        model.save_pretrained(folder / "packed")

    return flow


def tokenizer() -> Any:
    """Return a tokenizer of words ``t0`` to ``t127``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(128)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2")


def tiny_trainer(stack: ExitStack, **options: Any) -> Any:
    """Return a trainer of GRPO on a quantized model of two layers."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(folder), quantization_config=MXFP4RLConfig())
    args = MXFP4GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return MXFP4GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["t5 t6", "t7 t8"]}),
        processing_class=tokenizer(),
    )


def rollout(stack: ExitStack) -> Flow:
    """Return one rollout, with noise, of which the log-probabilities are computed at once."""
    made = tiny_trainer(stack, aqn_num_stages=1, num_iterations=2)
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    return lambda: made._generate_and_score_completions([{"prompt": "t5 t6"}] * 2)


FLOWS: dict[str, Callable[[ExitStack], Flow]] = {
    "eager": lambda stack: forward(stack, "eager"),
    "cpu": lambda stack: forward(stack, "cpu"),
    "kept": kept,
    "packed": packed,
    "train": lambda _: train(),
    "triton": to_kernels,
    "experts": lambda _: experts(),
    "weight": weight,
    "trainer": lambda stack: tiny_trainer(stack).train,
    "rollout": rollout,
}
#: Flows that are too long to be timed here.
RUNS = ("weight", "trainer", "rollout")
#: Parts of the package that are counted, of flows of which not all are.
PARTS = {"rollout": ("rl", "model", "integrations")}


def count(name: str) -> tuple[Counter, float | None]:
    """Return what a flow calls, and the microseconds that it takes, of layers."""
    with ExitStack() as stack:
        flow = FLOWS[name](stack)
        counter = counted(flow, PARTS.get(name, ("",)), warm=name != "trainer")
        if name in RUNS:
            return counter, None
        return counter, 1e6 * min(timeit.repeat(flow, number=1, repeat=200))


def main() -> None:
    """Print the table."""
    # Before the kernels are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=FLOWS, default=list(FLOWS))
    print("| flow | calls | depth | files | frames | us |\n|---|---|---|---|---|---|")
    for name in parser.parse_args().only:
        counter, time = count(name)
        shown = "" if time is None else f"{time:.0f}"
        print(
            f"| {name} | {counter.calls} | {counter.depth} | {len(counter.files)} | {counter.frames} | {shown} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
