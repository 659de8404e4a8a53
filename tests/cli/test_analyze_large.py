# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 analyze` on a sharded checkpoint of 2 GB: bounded memory, killed half-way and resumed, a damaged shard.
`make test-all`; the small versions are in test_cli_analyze.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


pytestmark = [pytest.mark.large, pytest.mark.slow]

LAYERS, PER_SHARD = 16, 4
SHAPES = {"self_attn.q_proj": (4096, 2048), "mlp.gate_proj": (8192, 4096), "mlp.down_proj": (2048, 11008)}
# Prints the peak of its resident memory, in MB, as the last line of stderr.
COMMAND = (
    "import resource, sys; from hf_mxfp4.cli import main\n"
    "try: main()\n"
    "finally: print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)\n"
)


@pytest.fixture(scope="module")
def two_gigabytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    index, size = {}, 0
    for first in range(0, LAYERS, PER_SHARD):
        tensors = {}
        for layer in range(first, first + PER_SHARD):
            generator = torch.Generator().manual_seed(layer)
            for name, shape in SHAPES.items():
                tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=generator).bfloat16()
        shard = f"model-{first // PER_SHARD + 1:05}-of-{LAYERS // PER_SHARD:05}.safetensors"
        save_file(tensors, folder / shard)
        index |= dict.fromkeys(tensors, shard)
        size += sum(2 * tensor.numel() for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert size > 2e9
    return folder


def start(folder, out):
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "analyze", str(folder), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), os.getcwd()])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err, int(re.findall(r"PEAK (\d+)", err)[-1])


def reports(out: Path):
    return {name: (out / name).read_bytes() for name in ("report.json", "tensors.csv", "report.html")}


def test_memory_and_a_kill_half_way(two_gigabytes, tmp_path):
    started = time.perf_counter()
    code, _, err, peak = finish(start(two_gigabytes, tmp_path / "whole"))
    print(f"{time.perf_counter() - started:.1f} s, peak {peak} MB")
    assert code == 0, err
    assert peak < 1500
    process = start(two_gigabytes, tmp_path / "killed")
    progress = tmp_path / "killed" / "progress.jsonl"
    while process.poll() is None and not (progress.exists() and progress.read_bytes().count(b"\n") > 24):
        time.sleep(0.02)
    assert process.poll() is None, "it finished before it was killed"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = progress.read_bytes().count(b"\n")
    assert not (tmp_path / "killed" / "report.json").exists()
    code, _, err, _ = finish(start(two_gigabytes, tmp_path / "killed"))
    assert code == 0 and progress.read_bytes().count(b"\n") > done
    assert reports(tmp_path / "killed") == reports(tmp_path / "whole")


def test_a_truncated_shard_is_named_and_the_rest_reported(two_gigabytes, tmp_path):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in two_gigabytes.iterdir():
        os.link(path, folder / path.name)
    shard = folder / "model-00003-of-00004.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data[: len(data) // 2])
    code, out, err, _ = finish(start(folder, tmp_path / "out"))
    assert code == 1
    assert shard.name in out + err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["tensors"]) == (LAYERS - PER_SHARD) * len(SHAPES)
