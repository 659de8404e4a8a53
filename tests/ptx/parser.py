# SPDX-License-Identifier: Apache-2.0
"""Reads the PTX of one kernel: instructions, labels, registers and parameters."""

import re
from typing import NamedTuple


class Instruction(NamedTuple):
    """One statement.

    Attributes:
        op: name with all suffixes, ``"add.rn.f32"``.
        operands: texts; a vector ``{a, b}`` is a tuple of them, an address ``[a + 4]`` keeps its brackets.
        guard: register of the predicate and the value with which the instruction runs, or `None`.
        text: the statement, for messages.
    """

    op: str
    operands: tuple
    guard: tuple[str, bool] | None
    text: str


class Kernel(NamedTuple):
    """A parsed kernel. ``registers``: bits of each register or prefix of registers (1 for predicates); ``labels``: the
    instruction each names; ``parameters``: names in order."""

    instructions: list[Instruction]
    labels: dict[str, int]
    registers: dict[str, int]
    parameters: list[str]
    threads: int


_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"\s*([$\w]+):(?!:)")
_OPERAND = re.compile(r"\{([^}]*)\}|(\[[^\]]*\])|([^,\s{}\[\]]+)")


def parse(ptx: str) -> Kernel:
    """Return the only kernel of a module. Raises `ValueError` for a statement that is none."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    # Lines of the source, which end with no semicolon: before instructions, and as sections behind the kernel.
    ptx = re.sub(r"^[ \t]*\.loc\b[^\n]*", "", re.split(r"^\s*\.(?:file|section)\b", ptx, flags=re.M)[0], flags=re.M)
    head, _, body = ptx.partition(".entry")
    signature, _, body = body.partition(")")
    parameters = re.findall(r"\.param[^,]*?(\w+)\s*(?:,|$)", signature.partition("(")[2])
    directives, _, body = body.partition("{")
    threads = int(re.search(r"\.reqntid\s+(\d+)", directives).group(1))
    kernel = Kernel([], {}, {}, parameters, threads)
    scopes = [""]
    for number, part in enumerate(re.split(r";|(?<=\n)\s*(?=\{\s)|\}\s*(?=\n)", body.rpartition("}")[0])):
        _statement(part.strip(), number, scopes, kernel)
    return kernel


def _statement(text: str, number: int, scopes: list[str], kernel: Kernel) -> None:
    if text.startswith("{") and "}" not in text:
        # Names of an inner scope, which inline assembly opens: each is declared again there, with the same width.
        scopes[0], text = f"@{number}", text[1:].strip()
    while (label := _LABEL.match(text)) is not None:
        name = label.group(1) + ("" if label.group(1).startswith("$") else scopes[0])
        kernel.labels[name] = len(kernel.instructions)
        text = text[label.end() :].strip()
    if not text or text.startswith((".pragma", "}")):
        return
    if text.startswith(".reg"):
        kind, names = text.split(None, 1)[1].split(None, 1)
        for name in names.split(","):
            kernel.registers[name.strip().split("<")[0]] = 1 if kind == ".pred" else int(kind.strip(".busf"))
        return
    found = _STATEMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"not an instruction: {text!r}")
    negated, guard, op, rest = found.groups()
    if op.startswith(("ld", "st.")):
        op = op.replace(".shared::cta", ".shared")  # which is what `.shared` stands for (PTX ISA, ld and st)
    operands = []
    for vector, address, plain in _OPERAND.findall(rest):
        operands.append(tuple(part.strip() for part in vector.split(",")) if vector else address or plain)
    if op.startswith("bra") and not operands[0].startswith("$"):
        operands[0] += scopes[0]
    text, guard = re.sub(r"\s+", " ", text), guard and (guard, not negated)
    kernel.instructions.append(Instruction(op, tuple(operands), guard, text))
