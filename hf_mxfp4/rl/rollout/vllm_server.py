# SPDX-License-Identifier: Apache-2.0
"""A vLLM server that is gone, or that is no longer the one which the weights were pushed to.

TRL's client repeats a request that fails for about a minute, and then raises what `requests` says of sockets. In that
minute a supervisor may have started the server anew: it would answer, from the checkpoint that it was started on, and
nobody would notice. So the weights of a server get a name with each push, which a new server does not know.

Where the other side dies while NCCL sends, NCCL waits, and requests have no time limit. Somebody has to end a process
that waits so, and is told of it.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from ..._logging import get_logger


class VLLMServerError(RuntimeError):
    """The vLLM server does not answer, cannot do what it was asked, or has other weights than those of this run."""


#: Seconds in which a server says that it is well.
_HEALTH_TIMEOUT = 10

#: Seconds after which it is asked, where an answer is waited for, and again after as many.
_PATIENCE = 60


_START_AGAIN = "Start the server again with the same command, and"


class WatchedServer:
    """Makes errors of a server say what to do, and a server that was started anew an error.

    Args:
        client: TRL's `VLLMClient`, of the main process. Its methods are replaced.

    Attributes:
        version: the name of the weights that were pushed last; `None` before that, and where the server keeps none.
    """

    def __init__(self, client: Any):
        import requests  # TRL's client needs it, the rest of the project does not

        self._client, self._requests = client, requests
        self._run, self._pushes, self.version = uuid.uuid4().hex, 0, None
        client.generate = self._telling("sampling", client.generate, self._check_version)
        client.image_features = self._telling("reading images", client.image_features)
        client.update_named_params = self._telling("receiving weights", client.update_named_params, self._name_weights)
        client.reset_prefix_cache = self._telling("forgetting its prefix cache", client.reset_prefix_cache)

    @classmethod
    def of(cls, generation: Any) -> "WatchedServer | None":
        """Watch the server of TRL's `VLLMGeneration`; `None` without one, and in other than the main process."""
        client = getattr(generation, "vllm_client", None)
        return None if client is None else cls(client)

    def _telling(self, what: str, method: Callable, afterwards: Callable[[], None] | None = None) -> Callable:
        """``method`` and then ``afterwards``, with a [`VLLMServerError`] for what the server fails in."""

        def asked(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._watched(what):
                    answer = method(*args, **kwargs)
                if afterwards is not None:
                    afterwards()
            except VLLMServerError:
                raise
            except Exception as error:
                # For answers other than 200 TRL raises an Exception of no class of its own.
                if not isinstance(error, self._requests.RequestException) and type(error) is not Exception:
                    raise
                state = self._unwell()
                cure = "Its log says more; once that is mended," if state is None else _START_AGAIN
                raise self._error(f"{state or 'runs'}; it failed while {what}: {error}", cure) from error
            return answer

        return asked

    @contextlib.contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Within this context the log says when the server is waited for and does not answer."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_PATIENCE):
                state = self._unwell()
                if state is not None and not done.is_set():
                    get_logger().error(
                        "the vLLM server at %s %s, while %s; if this process goes on waiting, since NCCL notices "
                        "nothing, end it, start the server again, and resume from the newest checkpoint",
                        self._client.base_url, state, what,
                    )  # fmt: skip

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _error(self, what: str, cure: str) -> VLLMServerError:
        return VLLMServerError(
            f"the vLLM server at {self._client.base_url} {what}\n{cure} resume this run with resume_from_checkpoint: "
            "it pushes its weights before it samples"
        )

    def _unwell(self) -> str | None:
        """What is wrong with the server, in words; `None` where it says that it is well."""
        try:
            status = self._requests.get(f"{self._client.base_url}/health", timeout=_HEALTH_TIMEOUT).status_code
        except self._requests.RequestException:
            return "does not answer any more"
        return None if status == 200 else f"is not well (status {status})"

    def _name_weights(self) -> None:
        self._pushes += 1
        version = f"{self._run}-{self._pushes}"
        url = f"{self._client.base_url}/update_weight_version"
        response = self._client.session.post(url, json={"new_version": version})
        if response.status_code == 404:
            if self._pushes == 1:
                get_logger().warning(
                    "the vLLM server at %s keeps no version of its weights, as newer ones do: should it be started "
                    "anew in the middle of a step, this run cannot notice",
                    self._client.base_url,
                )
            return
        if response.status_code != 200:
            raise Exception(f"Request failed: {response.status_code}, {response.text}")
        self.version = version

    def _check_version(self) -> None:
        if self.version is None:
            return
        found = self._client._get(f"{self._client.base_url}/weight_info")["weight_version"]
        if found != self.version:
            raise self._error(
                f"has other weights than this run has pushed: version {found!r} instead of {self.version!r}. It was "
                "started anew, or another run pushes to it; its completions are not used",
                _START_AGAIN,
            )
