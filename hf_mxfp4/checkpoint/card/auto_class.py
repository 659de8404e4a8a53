# SPDX-License-Identifier: Apache-2.0
"""Find the class of transformers that loads an architecture, and the Hub's name of its task."""

import transformers
from transformers.models.auto import modeling_auto


#: Asked first, since a class can be in several tables; and the Hub's tag of what it does.
_TASKS = {
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForSeq2SeqLM": "text-generation",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMaskedLM": "fill-mask",
}


def auto_class(architecture: str) -> str:
    """Return the name of the auto class that makes an ``architecture`` with its head; the class itself, where no auto
    class of transformers does."""
    names = [name for name in vars(modeling_auto) if name.startswith("AutoModel") and name not in _TASKS]
    for name in (*_TASKS, "AutoModel", *names):
        table = getattr(getattr(getattr(modeling_auto, name, None), "_model_mapping", None), "_model_mapping", {})
        if any(architecture in ([entry] if isinstance(entry, str) else entry) for entry in table.values()):
            return name
    head = f"AutoModelFor{architecture.rpartition('For')[2]}"
    if "For" in architecture and hasattr(modeling_auto, head):
        return head
    return architecture if hasattr(transformers, architecture) else "AutoModel"


def pipeline_tag(architecture: str) -> str | None:
    """Return the Hub's name of the task of an ``architecture``, where it is one of the usual ones."""
    return _TASKS.get(auto_class(architecture))
