# SPDX-License-Identifier: Apache-2.0
"""Router replay with a colocated vLLM: training chooses the experts that vLLM chose.

vLLM returns experts from its model runner V2 alone, whose bookkeeping is Triton kernels. Triton has no CPU backend
here, so they are interpreted, and vLLM is told that there is one: in a process of its own, which runs this file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton.backends


if __name__ == "__main__":

    class _Interpreter:
        """What vLLM asks of a driver."""

        is_active = staticmethod(lambda: True)

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Interpreter)

import harness
import torch
from grpo_runs import TOKENIZER, logged, trainer_factory
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.model.routers import find_routers, recorded_choices
from hf_mxfp4.rl.router_replay import BATCH_KEY, routed_tokens


pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
#: Two rollouts, each trained on twice: the second time by routers that have changed.
OPTIONS = {"router_replay": True, "aqn": False, "max_steps": 4, "num_iterations": 2, "learning_rate": 1e-2}


def watched(trainer) -> dict[str, list]:
    """What vLLM returns, ``[tokens, layers, k]`` of each sequence, and whether training routes as its batch says."""
    found = {"returned": [], "recorded": [], "as_recorded": [], "covered": []}
    llm = trainer.vllm_generation.llm
    compute = trainer._compute_loss
    generate = llm.generate

    def generated(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        found["returned"] += [output.outputs[0].routed_experts.tolist() for output in outputs]
        return outputs

    def computed(model, inputs):
        with recorded_choices(find_routers(trainer.model)) as choices:
            loss = compute(model, inputs)
        routed = torch.stack([torch.cat(passes) for passes in choices.values()], dim=1)
        recorded = inputs[BATCH_KEY].long()
        known = recorded >= 0
        required = routed_tokens(inputs["prompt_mask"], inputs["completion_mask"])
        found["as_recorded"].append(torch.equal(routed.view_as(recorded)[known], recorded[known]))
        found["covered"].append(bool(known.flatten(2).all(-1)[required].all()))
        rows = [row[keep.flatten(1).all(-1)].tolist() for row, keep in zip(recorded, known, strict=True)]
        found["recorded"].append(rows)
        return loss

    llm.generate = generated
    trainer._compute_loss = computed
    return found


def run(folder: Path) -> None:
    harness.tiny_model("qwen3_moe", moe_intermediate_size=128).save_pretrained(folder / "full")
    TOKENIZER.save_pretrained(folder / "full")
    scheme = MXFP4RLConfig(preset="w4a16")
    AutoModelForCausalLM.from_pretrained(folder / "full", quantization_config=scheme).save_pretrained(folder / "policy")
    TOKENIZER.save_pretrained(folder / "policy")
    harness.in_float32()
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    trainer = trainer_factory(folder)(policy=policy, **harness.COLOCATED, **OPTIONS)
    found = watched(trainer)
    trainer.train()
    keys = {key for entry in trainer.state.log_history for key in entry if key.startswith(("sampling", "router"))}
    found["logged"] = {key: list(logged(trainer, key).values()) for key in sorted(keys)}
    (folder / "found.json").write_text(json.dumps(found))


def test_training_routes_as_vllm_did(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    paths = os.pathsep.join(map(str, [ROOT, ROOT / "kernels", ROOT / "tests"]))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    # Two rollouts of eight sequences, each trained on twice in the order of a batch.
    rollouts = found["returned"][:8], found["returned"][8:]
    assert [sorted(batch) for batch in found["recorded"]] == [sorted(rollouts[step // 2]) for step in range(4)]
    assert found["as_recorded"] == found["covered"] == [True] * 4
    log = found["logged"]
    assert log["router_replay/coverage"] == [1.0] * 4
    # The routers that vLLM has are those that train: by themselves they choose alike, until they have learnt.
    changed = log["router_replay/changed"]
    assert changed[0] == changed[2] == 0.0
    assert changed[1] > 0.02
    for bound in ("min", "max"):
        assert log[f"sampling/importance_sampling_ratio/{bound}"] == pytest.approx([1, 1], abs=1e-4)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
