# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks ask of llama.cpp's programs, and what they read of their answers."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import llama_cpp


@pytest.fixture
def programs(monkeypatch):
    """Commands that were run; ``answer`` is what they write."""
    seen = SimpleNamespace(commands=[], paths=[], answer="", code=0)

    def run(command, capture_output, text, env):
        seen.commands.append(command)
        seen.paths.append(env.get("PYTHONPATH", ""))
        return SimpleNamespace(returncode=seen.code, stdout=seen.answer, stderr="out of memory")

    monkeypatch.setattr(llama_cpp.subprocess, "run", run)
    return seen


def test_a_checkpoint_is_converted_once_and_its_linear_layers_quantized(programs, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    files = llama_cpp.gguf_files(Path("tree"), Path("model"), Path("target"))
    assert files == {"bf16": Path("target/bf16.gguf"), "mxfp4": Path("target/mxfp4.gguf")}
    convert, quantize = programs.commands
    assert convert[1:] == ["tree/convert_hf_to_gguf.py", "model", "--outtype", "bf16", "--outfile", "target/bf16.gguf"]
    assert programs.paths[0].split(":") == ["tree/gguf-py", "mine"]
    assert quantize[0] == "tree/build/bin/llama-quantize"
    assert quantize[-3:] == ["target/bf16.gguf", "target/mxfp4.gguf", "Q8_0"]
    assert [quantize[i + 1] for i, word in enumerate(quantize) if word == "--tensor-type"] == [
        "attn_.*=mxfp4",
        "ffn_.*=mxfp4",
    ]


def test_seconds_are_those_of_prompt_and_new_tokens_together(programs):
    programs.answer = json.dumps([{"n_prompt": 32, "n_gen": 8, "samples_ns": [1_500_000_000]}])
    assert llama_cpp.llama_bench(Path("tree"), Path("m.gguf"), threads=2, prompt=32, tokens=8) == 1.5
    (command,) = programs.commands
    asked = dict(zip(command[1::2], command[2::2], strict=True))
    assert asked["-pg"] == "32,8" and asked["-t"] == "2" and asked["-p"] == asked["-n"] == "0"


def test_a_program_that_fails_is_an_error_with_its_words(programs):
    programs.code = 1
    with pytest.raises(RuntimeError, match="llama-bench failed:\nout of memory"):
        llama_cpp.llama_bench(Path("tree"), Path("m.gguf"), 1, 1, 1)


def test_a_folder_without_a_build_is_an_error(tmp_path):
    with pytest.raises(OSError, match="libggml-base.so"):
        llama_cpp.Libraries(tmp_path)
