# SPDX-License-Identifier: Apache-2.0
"""The card (`README.md`) that TRL writes into the output folder of a run, without links to what does not exist."""

from pathlib import Path


#: What TRL's template makes of a base model, and of a repository, that has no name on the Hub.
_NO_BASE, _NO_REPOSITORY = "[None](https://huggingface.co/None)", 'model="None"'
_PIPELINE = "from transformers import pipeline\n"


def mend_card(path: Path, base: str, quantized: bool) -> None:
    """Rewrite TRL's card in place: what was trained in the place of ``None``, and the import that MXFP4 layers need.

    Args:
        base: name of a local model, or of a class where the model has none.
        quantized: whether the policy has MXFP4 layers.
    """
    text = path.read_text(encoding="utf-8")
    text = text.replace(_NO_BASE, f"the local model `{base}`")
    text = text.replace(_NO_REPOSITORY, 'model="path/to/this/model"')
    if quantized:
        text = text.replace(_PIPELINE, f"import hf_mxfp4  # the layers\n{_PIPELINE}")
    path.write_text(text, encoding="utf-8")
