"""The text that the embedded pair is trained on: stories from a file, with multiplication sheets among them.

    python recipes/fable/corpus.py STORIES.txt CORPUS.txt

A sheet is 3 to 12 lines ``a * b = c`` with factors from 1 to 99; sheets stand between paragraphs, and make up about a
tenth of the characters. The same file gives the same corpus.
"""

import argparse
import random
from pathlib import Path

_SHARE = 0.1  # of the characters
_PARAGRAPHS = 8  # between two sheets or groups of sheets


def sheet(generator: random.Random) -> str:
    """Some solved lines."""
    factors = [(generator.randint(1, 99), generator.randint(1, 99)) for _ in range(generator.randint(3, 12))]
    return "\n".join(f"{a} * {b} = {a * b}" for a, b in factors)


def mixed(stories: str, seed: int = 0) -> str:
    """Stories with sheets."""
    generator = random.Random(seed)
    out: list[str] = []
    owed = 0.0  # characters of sheets that are due
    for number, paragraph in enumerate(stories.split("\n\n"), start=1):
        out.append(paragraph)
        owed += len(paragraph) * _SHARE / (1 - _SHARE)
        while number % _PARAGRAPHS == 0 and owed > 0:
            out.append(sheet(generator))
            owed -= len(out[-1])
    return "\n\n".join(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stories", type=Path)
    parser.add_argument("corpus", type=Path)
    arguments = parser.parse_args()
    arguments.corpus.write_text(mixed(arguments.stories.read_text(encoding="utf-8")), encoding="utf-8")
