# SPDX-License-Identifier: Apache-2.0
"""A model of the size of Qwen2.5-1.5B that generates: in BF16, packed, as a QAT rollout, in NF4.

`generate` as transformers runs it, which launches every kernel from Python, and one token for each sequence on a static
cache, which a CUDA graph holds where the model's layers let it.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, StaticCache

from hf_mxfp4 import MXFP4RLConfig, cached_weights

from .. import models
from ..bench import Absent, Bench, Measured, Work, times_of
from ..checks import WrongResult, expect_close
from ..timing import MAX_ROUNDS, Call, take_turns


NAME, SHARE = "generate_e2e", 70

OURS: dict[str, MXFP4RLConfig] = {
    "packed w4a16": MXFP4RLConfig(mode="packed"),
    "QAT w4a4g4 rollout": MXFP4RLConfig(preset="w4a4g4", outlier_fallback=None),
}
BF16, NF4 = "BF16", "bitsandbytes NF4"
#: Logits of all layers against those of the eager definition, both in bfloat16. Where activations are quantized,
#: values that sums in another order move across a rounding boundary move on by a whole step.
BOUNDS = {"packed w4a16": 5e-2, "QAT w4a4g4 rollout": 2e-1}
#: Seconds to build and check all models.
_NEEDS = 20.0


def run(bench: Bench) -> None:
    if not bench.machine.tiny and bench.seconds_left < _NEEDS:
        raise Absent("no time left to build the models")
    built, missing = _build(bench)
    _generate(bench, built, missing)
    for batch in (2,) if bench.machine.tiny else (1, 16):
        for name in OURS:
            what = f"{name}, one token on a static cache"
            bench.case(what, [batch], lambda n=name, b=batch: _step(bench, built, missing, n, b))


# ---- models ---------------------------------------------------------------------------------------------------------


def _build(bench: Bench) -> tuple[dict[str, PreTrainedModel], dict[str, Exception]]:
    """The models by arm, found right, and the errors of those that are not or could not be built."""
    # Token 1 would end a sequence.
    probe = torch.randint(2, 300, (2, 16), generator=torch.Generator().manual_seed(0)).to(bench.machine.device)
    builders: dict[str, Callable[[], PreTrainedModel]] = {
        BF16: lambda: models.build(bench.machine, torch.bfloat16),
        **{name: lambda name=name: _ours(bench, name, probe) for name in OURS},
        NF4: lambda: _nf4(bench, built[BF16], probe),
    }
    built: dict[str, PreTrainedModel] = {}
    missing: dict[str, Exception] = {}
    for name, build in builders.items():
        try:
            built[name] = build()
        except Exception as error:
            missing[name] = error
    return built, missing


def _ours(bench: Bench, name: str, probe: torch.Tensor) -> PreTrainedModel:
    config, machine = OURS[name], bench.machine
    model = models.quantized(models.build(machine, torch.bfloat16), config, machine)
    with cached_weights(model):
        out = models.logits(model, probe)
    eager = models.quantized(models.build(machine, torch.bfloat16), replace(config, backend="eager"), machine)
    expect_close(f"{name}: logits", out, models.logits(eager, probe), BOUNDS[name])
    return model


def _nf4(bench: Bench, plain: PreTrainedModel, probe: torch.Tensor) -> PreTrainedModel:
    model = models.nf4(models.build(bench.machine, torch.bfloat16), bench.machine)
    # Four bits of random weights through all layers: near enough to tell a working model from a broken one.
    expect_close("NF4: logits", models.logits(model, probe), models.logits(plain, probe), 0.7)
    return model


def _context(name: str, model: PreTrainedModel) -> contextlib.AbstractContextManager:
    """What rollouts of an arm run in: what the trainer runs them in."""
    return cached_weights(model) if name in OURS else contextlib.nullcontext()


def _notes(missing: dict[str, Exception]) -> dict[str, dict]:
    return {
        name: {"status": "absent" if isinstance(error, Absent) else "failed", "reason": str(error)}
        for name, error in missing.items()
        if name not in OURS
    }


# ---- generate -------------------------------------------------------------------------------------------------------


def _generate(bench: Bench, built: dict[str, PreTrainedModel], missing: dict[str, Exception]) -> None:
    batch, prompt, new = sizes = (2, 3, 2) if bench.machine.tiny else (16, 128, 64)
    ids = torch.randint(2, 300, (batch, prompt), generator=torch.Generator().manual_seed(1)).to(bench.machine.device)

    def generate(name: str) -> None:
        with _context(name, built[name]):
            out = built[name].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
            )
        if out.shape != (batch, prompt + new):
            raise WrongResult(f"generate made {out.shape[1] - prompt} tokens, not {new}")

    calls = {name: lambda name=name: generate(name) for name in built}
    timings = take_turns(bench.machine, calls, 0.5 * bench.seconds_left)

    def measured(name: str) -> Measured:
        if name in missing:
            raise missing[name]
        mine = timings[name]
        peers = _notes(missing)
        for other in (BF16, NF4):
            if other in timings and other != name:
                ratio = timings[other].ratio_to(mine)
                peers[other] = {**times_of(timings[other]), "ratio": ratio, "status": "ok"}
        ratio = peers.get(BF16, {}).get("ratio")
        details = {**times_of(mine), "peers": peers}
        return Measured(batch * new / mine.seconds, "tokens/s", BF16, ratio, details=details)

    for name in (BF16, *OURS):
        bench.case(f"{name}, generate", list(sizes), lambda name=name: measured(name))


# ---- one token ------------------------------------------------------------------------------------------------------


def _step(
    bench: Bench, built: dict[str, PreTrainedModel], missing: dict[str, Exception], name: str, batch: int
) -> Measured:
    if name in missing:
        raise missing[name]

    def peer(other: str) -> Sequence[Call]:
        if other in missing:
            raise missing[other]
        return [_one_token(bench, built[other], batch)]

    with torch.no_grad(), _context(name, built[name]):
        calls = [_one_token(bench, built[name], batch)]
        peers = {other: lambda other=other: peer(other) for other in (BF16, NF4)}
        n_bytes = sum(p.numel() * p.element_size() for p in built[name].parameters())
        work = Work(n_bytes if name.startswith("packed") else 0)
        found = bench.contest(calls, peers, work, "tokens/s", batch, baseline=BF16)
    if not work.n_bytes:
        found.ceiling_fraction = None
    return found


def _one_token(bench: Bench, model: PreTrainedModel, batch: int) -> Call:
    """The next token of each sequence, by the model as `generate` calls it, after a prompt that is in the cache."""
    ids = torch.full((batch, 4), 5, device=bench.machine.device)
    # Every call appends a token: of all rounds, warming up and capturing.
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + MAX_ROUNDS + 16)
    token = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    def step() -> torch.Tensor:
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        return logits[:, -1].argmax(-1)

    if not bool((step() < model.config.vocab_size).all()):
        raise WrongResult("a token outside of the vocabulary")
    return step
