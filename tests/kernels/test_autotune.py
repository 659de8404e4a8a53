# SPDX-License-Identifier: Apache-2.0
"""The choice of launch parameters and the files it is kept in; the GPU and the clock are stand-ins."""

import contextlib
import json
import types

import pytest
import torch
from triton.runtime.errors import OutOfResources

from mxfp4_kernels.common import autotune as _autotune
from mxfp4_kernels.common import counters
from mxfp4_kernels.common.autotune import autotune, cache_file, choose
from mxfp4_kernels.gemm.configs import launch_tuned


CONFIGS = [{"BLOCK_M": 64, "num_warps": 4}, {"BLOCK_M": 128, "num_warps": 8}, {"BLOCK_M": 256, "num_warps": 8}]
DEVICE = torch.device("cuda", 0)


class Gpu:
    """Stands for torch.cuda: which device is current, and whether its stream is under capture."""

    current, capturing = torch.device("cuda", 3), False

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device
        yield
        self.current = before


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "device", gpu.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setenv("HF_MXFP4_CACHE", str(tmp_path))
    for name in ("HF_MXFP4_AUTOTUNE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_autotune, "gpu_name", lambda device: "some_gpu")
    monkeypatch.setattr(_autotune, "_SHIPPED", tmp_path / "shipped")
    _autotune._chosen.clear()
    yield gpu
    _autotune._chosen.clear()


def bench(fastest: int, ran: list | None = None):
    def time(config):
        if ran is not None:
            ran.append(config["BLOCK_M"])
        return abs(config["BLOCK_M"] - fastest)

    return time


def ask(time=None, configs=CONFIGS, key=(16, "bfloat16")):
    return choose("matmul", key, configs, time or bench(128), DEVICE)


def test_nothing_is_measured_unless_asked_for(tmp_path):
    ran = []
    assert ask(bench(128, ran)) is CONFIGS[0]
    assert ran == [] and list(tmp_path.iterdir()) == []


def test_the_fastest_is_measured_once_and_found_again_by_other_processes(monkeypatch):
    ran = []
    ask()  # chosen without a measurement before
    with autotune():
        assert ask(bench(128, ran)) is ask(bench(128, ran)) is CONFIGS[1]
    assert ran == [64, 128, 256]
    _autotune._chosen.clear()
    assert ask(bench(0, ran)) is CONFIGS[1] and len(ran) == 3
    monkeypatch.setenv("HF_MXFP4_AUTOTUNE", "1")
    _autotune._chosen.clear()
    assert ask(bench(0, ran)) is CONFIGS[1] and len(ran) == 3
    assert ask(bench(256, ran), key=(32, "bfloat16")) is CONFIGS[2] and len(ran) == 6
    stored = json.loads(cache_file("some_gpu").read_text())
    assert stored["matmul"] == {"16 bfloat16": CONFIGS[1], "32 bfloat16": CONFIGS[2]}
    assert [path.name for path in cache_file("some_gpu").parent.iterdir()] == ["some_gpu.json"]


def test_what_was_chosen_under_capture_or_before_is_measured_once_that_is_asked_for(gpu, monkeypatch):
    ran = []
    ask(bench(128, ran), key=(1,))
    monkeypatch.setenv("HF_MXFP4_AUTOTUNE", "1")
    gpu.capturing = True
    for key in ((1,), (2,)):
        # The same for as long as the capture lasts.
        assert ask(bench(128, ran), key=key) is ask(bench(256, ran), key=key) is CONFIGS[0]
    assert ran == []
    gpu.capturing = False
    for key in ((1,), (2,)):
        assert ask(bench(128, ran), key=key) is ask(bench(256, ran), key=key) is CONFIGS[1]
    assert ran == [64, 128, 256] * 2


@pytest.mark.parametrize("how", ["launcher", "process group"])
def test_several_processes_read_what_one_measured(how, monkeypatch):
    ran = []
    with autotune():
        ask(bench(128, ran))
    if how == "launcher":
        monkeypatch.setenv("WORLD_SIZE", "2")
    else:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    _autotune._chosen.clear()
    _autotune._say_that_one_process_measures.cache_clear()
    with autotune():
        assert ask(bench(256, ran)) is CONFIGS[1]
        with pytest.warns(UserWarning, match="nothing is autotuned in 2 processes.*run one process alone first"):
            assert ask(bench(256, ran), key=(64, "bfloat16")) is CONFIGS[0]
        assert ask(bench(256, ran), key=(65, "bfloat16")) is CONFIGS[0]
    assert ran == [64, 128, 256]


def test_counters_are_those_of_a_graph_where_the_device_of_the_launch_is_captured(monkeypatch):
    current = [torch.device("cuda", 3)]

    @contextlib.contextmanager
    def on(device):
        before, current[0] = current[0], device
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == DEVICE)
    monkeypatch.setattr(counters, "_captured", lambda count, device: (count, device))
    assert counters.zeros_of_a_launch(7, DEVICE) == (7, DEVICE)


def test_measurements_are_of_the_device_that_the_kernel_runs_on(gpu):
    devices = []

    def time(config):
        devices.append(gpu.current)
        return 1.0

    with autotune():
        ask(time)
    assert devices == [DEVICE] * 3 and gpu.current != DEVICE


def test_a_measurement_that_is_kept_nowhere_counts_in_its_process(monkeypatch):
    monkeypatch.setattr(_autotune, "_remember", lambda *entry: None)
    ran = []
    for _ in range(2):
        with autotune():
            assert ask(bench(128, ran)) is CONFIGS[1]
    assert len(ran) == 3


def test_configs_that_fail_are_out():
    def fails_at_first(config):
        if config is CONFIGS[1]:
            raise RuntimeError("out of resource: shared memory")
        return bench(128)(config)

    def fails(config):
        raise RuntimeError("out of resource")

    with autotune():
        assert ask(fails_at_first) is CONFIGS[0]
        with pytest.warns(UserWarning, match="no config ran.*out of resource") as warned:
            assert ask(fails, key=(1,)) is ask(fails, key=(1,)) is CONFIGS[0]
        assert len(warned) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "v", "matmul": 3}', "\x00"])
def test_a_damaged_file_is_ignored_with_a_warning_and_replaced(text):
    cache_file("some_gpu").parent.mkdir(parents=True)
    cache_file("some_gpu").write_text(text)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert ask() is CONFIGS[0]
    with pytest.warns(UserWarning, match="cannot be read"), autotune():
        assert ask() is CONFIGS[1]
    assert json.loads(cache_file("some_gpu").read_text())["matmul"] == {"16 bfloat16": CONFIGS[1]}


def test_entries_of_other_versions_or_of_configs_no_longer_offered_do_not_count(monkeypatch):
    with autotune():
        ask()
    _autotune._chosen.clear()
    assert ask(configs=[CONFIGS[0], CONFIGS[2]]) is CONFIGS[0]
    _autotune._chosen.clear()
    monkeypatch.setattr(_autotune, "version", lambda: "another")
    assert ask() is CONFIGS[0]


def test_a_shipped_table_comes_before_the_first_config_and_after_a_measurement(tmp_path):
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "some_gpu.json").write_text(json.dumps({"matmul": {"16 bfloat16": CONFIGS[2]}}))
    assert ask() is CONFIGS[2]
    with autotune():
        assert ask() is CONFIGS[1]


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_MXFP4_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot"), autotune():
        assert ask() is CONFIGS[1]


def test_without_a_home_a_temporary_folder_is_used(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HF_MXFP4_CACHE")
    monkeypatch.setattr(_autotune.Path, "home", no_home)
    monkeypatch.setattr(_autotune.tempfile, "tempdir", str(tmp_path))
    _autotune._temporary_folder.cache_clear()
    with pytest.warns(UserWarning, match="there is no home folder"):
        folder = _autotune.cache_folder()
    assert folder.parent == tmp_path and folder == _autotune.cache_folder()
    _autotune._temporary_folder.cache_clear()


def test_interpreted_kernels_and_single_configs_need_no_choice():
    with autotune():
        assert choose("matmul", (), CONFIGS, bench(256), torch.device("cpu")) is CONFIGS[0]
        assert ask(configs=CONFIGS[2:]) is CONFIGS[2]
    with pytest.raises(ValueError, match="matmul: no configs"):
        ask(configs=[])


def test_the_version_names_triton_and_the_sources():
    assert _autotune.version().startswith("triton 3.") and "kernels" in _autotune.version()


def test_a_config_that_the_gpu_has_too_little_for_gives_way_to_the_first_that_runs():
    ran, out = [], types.SimpleNamespace(device=DEVICE)

    def run(config, target):
        ran.append(config["BLOCK_M"])
        if config["BLOCK_M"] != 256:
            raise OutOfResources(120000, 101376, "shared memory")

    with pytest.warns(UserWarning, match=r"matmul \(16, 'bfloat16'\): .*64.* does not run here, .*256.* does.*120000"):
        launch_tuned("matmul", (16, "bfloat16"), CONFIGS, run, out)
    assert ran == [64, 128, 256]
    launch_tuned("matmul", (16, "bfloat16"), CONFIGS, run, out)
    assert ran == [64, 128, 256, 256]
    with pytest.raises(OutOfResources):
        launch_tuned("matmul", (32, "bfloat16"), CONFIGS[:2], run, out)
    assert ran[4:] == [64, 128]
