# SPDX-License-Identifier: Apache-2.0
"""Files next to the weights: conversions keep what transformers reads, and copy nothing from outside of the folder."""

import json
import os

import pytest
from commands import ALPHABET, finish, save_texts
from export_files import save_plain
from tiny_models import save_openai
from transformers import AutoTokenizer

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import CheckpointError, pack_checkpoint
from hf_mxfp4.checkpoint.side_files import find_side_files
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer


PACKED = MXFP4RLConfig(mode="packed")
TEMPLATES = {"default": "{{ messages[0]['content'] }}", "tool_use": "T{{ messages[0]['content'] }}"}


def save_with_templates(folder):
    tokenizer = build_char_tokenizer(ALPHABET)
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def plain(tmp_path):
    return save_with_templates(save_plain(tmp_path / "plain", layers=1))


@pytest.mark.parametrize("words", [("pack",), ("export", "--format", "bf16"), ("smooth",), ("gptq",), ("import",)])
def test_every_command_keeps_all_chat_templates(words, plain, tmp_path):
    source = save_with_templates(save_openai(tmp_path / "openai")) if words == ("import",) else plain
    if words[0] in ("smooth", "gptq"):
        words = (*words, "--text", save_texts(tmp_path / "sums.jsonl", [{"text": "1+1=2"}]))
    finish(words[0], source, tmp_path / "out", *words[1:])
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATES


def test_a_checkpoint_with_templates_can_be_overwritten(plain, tmp_path):
    pack_checkpoint(plain, tmp_path / "out", PACKED)
    (plain / "additional_chat_templates" / "tool_use.jinja").rename(plain / "additional_chat_templates" / "rag.jinja")
    pack_checkpoint(plain, tmp_path / "out", PACKED, overwrite=True)
    assert os.listdir(tmp_path / "out" / "additional_chat_templates") == ["rag.jinja"]


def test_vocabularies_code_and_processors_are_found(tmp_path):
    contents = {
        "config.json": {"auto_map": {"AutoModel": "modeling_one.Model", "AutoConfig": "someone/else--gone.Config"}},
        "tokenizer_config.json": {"tokenizer_class": "LukeTokenizer", "auto_map": {"AutoTokenizer": ["words.W", None]}},
    }
    kept = ["entity_vocab.json", "generation_config.json", "merges.txt", "video_preprocessor_config.json", "vocab.json"]
    code = {"modeling_one.py": "from .parts import Part", "parts.py": "", "words.py": "from .missing import x"}
    for folder in ("custom_generate", "qformer_tokenizer", "runs"):
        (tmp_path / folder).mkdir()
    inner = ["custom_generate/generate.py", "qformer_tokenizer/tokenizer.json"]
    for name in (*kept, *inner, "runs/log.json", "train.py", "optimizer.pt", "notes.json"):
        (tmp_path / name).write_text("{}")
    for name, content in code.items():
        (tmp_path / name).write_text(content)
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = [file.relative_to(tmp_path).as_posix() for file in find_side_files(tmp_path)]
    assert found == sorted([*kept, *inner, *code, "tokenizer_config.json"])


@pytest.mark.parametrize("name", ["LICENSE-x", "additional_chat_templates/private.jinja"])
def test_links_out_of_the_folder_are_refused(name, plain, tmp_path):
    (tmp_path / "private").write_text("key")
    (plain / name).symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=f"{name} is a link to a file outside of the folder"):
        pack_checkpoint(plain, tmp_path / "out", PACKED)
    assert not (tmp_path / "out").exists()


def test_the_cache_of_the_hub_is_made_of_links(plain, tmp_path):
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    for number, file in enumerate(file for file in plain.rglob("*") if file.is_file()):
        file.rename(blobs / str(number))
        link = snapshot / file.relative_to(plain)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    pack_checkpoint(snapshot, tmp_path / "out", PACKED)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATES
    assert not any(file.is_symlink() for file in (tmp_path / "out").rglob("*"))
