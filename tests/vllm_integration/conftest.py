# SPDX-License-Identifier: Apache-2.0
"""Tests that run vLLM itself, in an environment of their own: `make test-vllm`. Elsewhere they are not collected.

The folder is not called `vllm`: it would be found by `import vllm`.
"""

import importlib.util


collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
if not collect_ignore_glob:
    import harness  # noqa: F401 sets what vLLM reads when it is imported
