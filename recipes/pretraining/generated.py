# SPDX-License-Identifier: Apache-2.0
"""A made-up language to pretrain on without any data: nothing to download, and its entropy is known.

A document is one of three things: a sentence of a probabilistic grammar (a Markov chain over word classes, each with
its own words of Zipf-distributed frequency: the rarer the word, the later it is learnt), an addition, or letters to
copy. The text of a document determines how it was generated, so that the generator's own log-probability is that of
the text, and its mean over a split is the loss that no model can stay below.
"""

import itertools
import math
import random
import string
from collections.abc import Iterator


ALPHABET = string.ascii_lowercase + string.digits + "+=| "
_KINDS = ("sentence", "sum", "copy")
_KIND_WEIGHTS = (0.6, 0.2, 0.2)
_SENTENCE_LENGTHS = range(4, 13)
_COPY_LENGTHS = range(3, 9)
_TERMS = range(100)


class Language:
    """A grammar and its words.

    Args:
        seed: of the grammar; the same seed gives the same language.
        n_classes: of words.
        n_words: in each class.
    """

    def __init__(self, seed: int = 0, n_classes: int = 8, n_words: int = 150):
        draw = random.Random(f"grammar {seed}")
        self.seed = seed
        words: set[str] = set()
        while len(words) < n_classes * n_words:
            words.add("".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 6))))
        shuffled = sorted(words)
        draw.shuffle(shuffled)
        self._words = [shuffled[i * n_words : (i + 1) * n_words] for i in range(n_classes)]
        zipf = [1 / rank for rank in range(1, n_words + 1)]
        self._word_weights = [weight / sum(zipf) for weight in zipf]
        self._word_cumulative = list(itertools.accumulate(self._word_weights))
        rows = [[draw.gammavariate(0.4, 1.0) + 1e-3 for _ in range(n_classes)] for _ in range(n_classes)]
        self._transitions = [[weight / sum(row) for weight in row] for row in rows]

    def documents(self, split: str) -> Iterator[tuple[str, float]]:
        """Endless documents and the information in each, in nats; a function of language and ``split`` alone."""
        draw = random.Random(f"documents {self.seed} {split}")
        while True:
            (kind,) = draw.choices(range(len(_KINDS)), _KIND_WEIGHTS)
            text, nats = getattr(self, f"_{_KINDS[kind]}")(draw)
            yield text, nats - math.log(_KIND_WEIGHTS[kind])

    def _sentence(self, draw: random.Random) -> tuple[str, float]:
        length = draw.choice(_SENTENCE_LENGTHS)
        nats = math.log(len(_SENTENCE_LENGTHS)) + math.log(len(self._words))
        current = draw.randrange(len(self._words))
        text = []
        for position in range(length):
            if position:
                row = self._transitions[current]
                (current,) = draw.choices(range(len(row)), row)
                nats -= math.log(row[current])
            (word,) = draw.choices(range(len(self._word_weights)), cum_weights=self._word_cumulative)
            nats -= math.log(self._word_weights[word])
            text.append(self._words[current][word])
        return " ".join(text), nats

    def _sum(self, draw: random.Random) -> tuple[str, float]:
        a, b = draw.choice(_TERMS), draw.choice(_TERMS)
        return f"{a}+{b}={a + b}", 2 * math.log(len(_TERMS))

    def _copy(self, draw: random.Random) -> tuple[str, float]:
        length = draw.choice(_COPY_LENGTHS)
        letters = "".join(draw.choices(string.ascii_lowercase, k=length))
        return f"{letters}|{letters}", math.log(len(_COPY_LENGTHS)) + length * math.log(26)


def generate(language: Language, split: str, tokens: int) -> tuple[list[str], float]:
    """Documents of at least ``tokens`` characters, each with its end counted as one more, and nats per character."""
    texts, count, total = [], 0, 0.0
    for text, nats in language.documents(split):
        texts.append(text)
        count += len(text) + 1
        total += nats
        if count >= tokens:
            return texts, total / count
    raise AssertionError("documents never end")
