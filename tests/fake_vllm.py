# SPDX-License-Identifier: Apache-2.0
"""A small server that speaks the part of vLLM's HTTP interface that TRL uses, and that can die; and a client of TRL's
for it where there is neither vLLM nor CUDA."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class FakeVLLM:
    """The server; a context manager that serves while it is open.

    Args:
        port: where it listens; by default a free one.
        dies: the request in which it dies, as ``(path, how many it answers before)``.
        answers: other answers than usual, by path: ``(status, body)``.
    """

    def __init__(self, port: int = 0, *, dies: tuple[str, int] | None = None, answers=()):
        self.dies = dies
        self.answers = dict(answers)
        self.requests: list[str] = []
        self.is_dead = False
        self._http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"fake": self}))
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "FakeVLLM":
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self.die()

    def die(self) -> None:
        """Answer nobody any more, as a process that was killed."""
        if not self.is_dead:
            self.is_dead = True
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()

    def answer(self, path: str, body: dict) -> tuple[int, dict]:
        if path in self.answers:
            return self.answers[path]
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy"}]}
        if path == "/server_info":
            model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "quantization": None}
            return 200, {"vllm_config": {"weight_transfer_config": {}, "model_config": model}}
        if path == "/v1/completions":
            return 200, {"choices": [_choice(prompt, i) for prompt in body["prompt"] for i in range(body["n"])]}
        return 200, {}


def _choice(prompt: list[int], index: int) -> dict:
    """A completion of two tokens, by which those of a prompt differ; a policy that knows nothing is not far from its
    log-probabilities."""
    tokens = [2 + index, 1]
    names = [f"token_id:{token}" for token in tokens]
    logprobs = {"tokens": names, "token_logprobs": [-3.4] * len(tokens), "top_logprobs": [{}] * len(tokens)}
    return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVLLM
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply(json.loads(text or "{}"))

    def _reply(self, body: dict) -> None:
        path = urlsplit(self.path).path
        fake = self.fake
        if fake.dies is not None and path == fake.dies[0] and fake.requests.count(path) == fake.dies[1]:
            fake.die()
        if fake.is_dead:  # also over connections that were open
            self.close_connection = True
            return
        fake.requests.append(path)
        status, answer = fake.answer(path, body)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def use_fake_vllm(monkeypatch) -> list[dict]:
    """Let TRL's server mode run against [`FakeVLLM`]: vLLM is there as far as TRL can see, weights are sent nowhere,
    and failed requests are repeated at once. The list of what was pushed, by name."""
    from trl.generation import vllm_client, vllm_generation

    pushed = []
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *a, **k: True)
    monkeypatch.setattr(vllm_client, "_HAS_STATEFUL_TRAINER_ENGINE", True)
    monkeypatch.setattr(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)

    def send(iterator, **options):
        pushed.append({name: tensor.clone() for name, tensor in iterator})

    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", send, raising=False)
    retry = vllm_client.Retry
    monkeypatch.setattr(vllm_client, "Retry", lambda **options: retry(**{**options, "backoff_factor": 0}))
    return pushed
