# SPDX-License-Identifier: Apache-2.0
"""Tokens of texts and completions that a dataset gives, as [`trl.SFTTrainer`] makes them."""

import copy
import json
from typing import Any


def given_column(row: dict[str, Any]) -> str | None:
    """Return the column of what is learned of a row, or `None` if it has no text or completion."""
    columns = ["input_ids", "messages", "conversations", "text"]
    if row.get("prompt") is not None:
        columns.insert(1, "completion")
    return next((name for name in columns if row.get(name) is not None), None)


def given_tokens(row: dict[str, Any], tokenizer: Any, **template: Any) -> tuple[list[int], int]:
    """Return the tokens of a row that [`given_column`] knows, and the number of those before what is learned.

    Plain text ends with an end-of-sequence token. ``template``: options of the chat template, which the row's `tools`
    and `chat_template_kwargs` replace.
    """
    from trl.data_utils import common_prefix_length, is_conversational_from_value, maybe_convert_to_chatml

    if is_conversational_from_value(row):
        row = maybe_convert_to_chatml(copy.deepcopy(row))
    tools = row.get("tools")
    if tools is not None:
        template["tools"] = json.loads(tools) if isinstance(tools, str) else tools
    template |= row.get("chat_template_kwargs") or {}

    def encode(text: str | list, **options: Any) -> list[int]:
        if isinstance(text, str):
            return tokenizer(text)["input_ids"]
        return tokenizer.apply_chat_template(text, return_dict=True, **{**template, **options})["input_ids"]

    column = given_column(row)
    given = row[column]
    if column == "input_ids":
        return given, _masked_tokens(row)
    end = tokenizer.eos_token or ""
    if isinstance(given, str) and not given.endswith(end):
        given += end
    if column != "completion":
        return encode(given), 1
    ids = encode(row["prompt"] + given)
    return ids, max(1, common_prefix_length(encode(row["prompt"], add_generation_prompt=True), ids))


def _masked_tokens(row: dict[str, Any]) -> int:
    """Return how many tokens precede those that the `labels` of a row, if any, let learn."""
    learned = [label != -100 for label in row.get("labels") or row["input_ids"]]
    start = learned.index(True) if any(learned) else len(learned)
    if not all(learned[start:]):
        raise ValueError("labels can only leave out the beginning of a row")
    return max(1, start)
