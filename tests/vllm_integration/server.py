# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on the CPU, and TRL's client for it, whose weights travel through a TCP store instead of NCCL."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
import torch
import vllm
from safetensors.torch import load_file
from trl.generation import vllm_client
from vllm.distributed.utils import StatelessProcessGroup


ROOT = Path(__file__).resolve().parents[2]

#: As docs/vllm.md says, with the transfer of the tests, in float32 and without compilation.
OPTIONS = [
    "--weight-transfer-config", '{"backend": "store"}', "--worker-extension-cls", "harness.Extension",
    "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "64", "--max-num-seqs", "8", "--host", "127.0.0.1",
]  # fmt: skip


class Server:
    """A `vllm serve` of the checkpoint in ``folder``; a context manager that ends it. It writes into ``work``."""

    def __init__(self, folder: Path, work: Path, *options: str, port: int | None = None):
        self.port = port or free_port()
        self.work = work
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = work / f"server-{len(list(work.iterdir()))}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *OPTIONS]
        command += ["--port", str(self.port), *options]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=_environment(work), stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> "Server":
        try:
            self._wait(timeout=300)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self.kill()

    def _wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.5)
        raise RuntimeError(f"vllm serve did not come up:\n{self.log()[-4000:]}")

    def kill(self) -> None:
        """End the server and all processes of its own, at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text()

    def weights(self) -> dict[str, torch.Tensor]:
        """Those that the server computes with now, by the names that transformers has for them."""
        path = self.work / "served.safetensors"
        answer = requests.post(
            f"{self.url}/collective_rpc", json={"method": "save_served_weights", "args": [str(path)]}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return load_file(path)

    def logprobs(self, prompts: list[list[int]]) -> torch.Tensor:
        """Log-probabilities ``[prompts, length - 1]`` of the tokens of the prompts."""
        body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}
        answer = requests.post(f"{self.url}/v1/completions", json=body, timeout=60).json()
        rows = []
        for ids, choice in zip(prompts, answer["choices"], strict=True):
            found = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
            rows.append([chosen[str(token)]["logprob"] for token, chosen in found])
        return torch.tensor(rows)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _environment(work: Path) -> dict[str, str]:
    """For a server that is found on its own: `vllm serve` asks for the metadata of a distribution called vllm, whose
    CPU build is called otherwise, and knows by its version that it is one for CPUs."""
    metadata = work / f"vllm-{vllm.__version__.split('+')[0]}+cpu.dist-info" / "METADATA"
    if not metadata.exists():
        metadata.parent.mkdir()
        version = metadata.parent.name.removeprefix("vllm-").removesuffix(".dist-info")
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    paths = [work, ROOT / "tests" / "vllm_integration", ROOT / "tests", ROOT, ROOT / "kernels"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return environment


def use_store(monkeypatch) -> None:
    """Let TRL's client send weights through a store, and not repeat for a minute what failed."""
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", _init_communicator)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", _send)
    retry = vllm_client.Retry
    monkeypatch.setattr(vllm_client, "Retry", lambda **options: retry(**{**options, "backoff_factor": 0.1}))


def _init_communicator(self, device: torch.device) -> None:
    """TRL's, with another group: the server joins while it handles the request."""
    assert self.get_server_info()["weight_transfer_config"] == json.loads(OPTIONS[1])
    world_size = self.get_world_size() + 1
    info = {
        "master_address": "127.0.0.1",
        "master_port": self.group_port,
        "rank_offset": 1,
        "world_size": world_size,
    }
    with ThreadPoolExecutor(max_workers=1) as executor:
        joined = executor.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
        self.communicator = StatelessProcessGroup.create("127.0.0.1", self.group_port, 0, world_size)
        joined.result()


def _send(iterator, group: StatelessProcessGroup, src: int, post_iter_func) -> None:
    for item in iterator:
        group.broadcast_obj(post_iter_func(item).detach(), src)
