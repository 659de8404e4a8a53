# SPDX-License-Identifier: Apache-2.0
"""Settings and small models that all tests share."""

import gc
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable


os.environ.setdefault("CI", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_MXFP4_VERBOSITY", "warning")

import numpy
import processes
import pytest
import torch
from tiny_models import make_model
from transformers.utils import logging

from hf_mxfp4._logging import get_logger


torch.set_num_threads(1)
get_logger()  # it propagates nothing: caplog listens to such loggers, to those that there are when a test begins


@pytest.fixture(scope="module", autouse=True)
def frozen_imports():
    """What lives before a file is tested, most of it imported modules, is not searched for garbage again. Trainers
    collect it after every run: of three of their files that was 39 % of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def randomness_of_the_file(request):
    """What fixtures draw for a whole file is the same in every run, whichever files its process ran before."""
    seed_from(request.node.nodeid)


@pytest.fixture(autouse=True)
def randomness_of_the_test(request):
    """What a test draws without a seed of its own is the same in every run, be it alone or after others."""
    seed_from(request.node.nodeid)


def seed_from(name: str) -> None:
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def dense_products(monkeypatch):
    """Products with packed weights on the CPU have the bits of `F.linear` with the dequantized weight, those of few
    rows too, which are otherwise computed on the codes: for tests of something else that compare packed layers with
    trainable or dense ones."""
    monkeypatch.setattr("hf_mxfp4.ops.cpu.most_rows", lambda: 0)


@pytest.fixture
def progress_bars():
    """The bars of transformers, which tests are without."""
    logging.enable_progress_bar()
    yield
    logging.disable_progress_bar()


@pytest.fixture
def checkpoint(tmp_path):
    """A factory of saved full-precision checkpoints: `checkpoint(family, **options)` gives the folder."""

    def save(family="qwen2", *, shard_size="5GB", **options):
        folder = tmp_path / f"base-{family}-{len(list(tmp_path.iterdir()))}"
        make_model(family, **options).save_pretrained(folder, max_shard_size=shard_size)
        return str(folder)

    return save


@pytest.fixture
def copy(saved, tmp_path):
    """A factory of copies to damage: `copy(name)` gives one of a folder that the file's own fixture `saved` has."""

    def make(name):
        shutil.copytree(saved[name], tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def blank_pictures(monkeypatch):
    """Pictures are empty: for tests of the rest, of which drawing is most of the time. Fixtures that last longer than
    a test still draw theirs."""
    from undrawn import leave_figures_undrawn

    leave_figures_undrawn(monkeypatch.setattr)


@pytest.fixture
def run_script(request) -> Callable[..., dict]:
    """``run_script(name, *arguments, interpret)``: what a script beside the test prints, parsed as JSON, with Triton's
    kernels interpreted or compiled.

    A process of its own, because Triton looks at TRITON_INTERPRET when a kernel is defined, its own library functions
    included: whichever test imports it first decides for the whole process. What is compiled is kept between runs, in
    pytest's cache: Triton knows it by the sources, the options and its own version.
    """
    environment = {"TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton"))}

    def run(name: str, *arguments: str, interpret: bool) -> dict:
        job = processes.script(request.path.with_name(name), *arguments)
        options = {"environment": os.environ | environment, "interpret": interpret, "no_warnings": True}
        done = processes.run(job, timeout=600, **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def plugin():
    """The modules of the vLLM plugin, on stand-ins for vLLM's classes."""
    from vllm_stand_ins import plugin_with_stand_ins

    with plugin_with_stand_ins() as plugin:
        yield plugin


@pytest.fixture
def count():
    """Gives how many matrices were quantized for forward products since it was last asked."""
    from hf_mxfp4.ops import weight_quantizations

    seen = [weight_quantizations()["fprop"]]

    def ask() -> int:
        before, seen[0] = seen[0], weight_quantizations()["fprop"]
        return seen[0] - before

    return ask
