"""The published files that benchmarks/real_models.py fetches, and short prompts for them.

Tests use files that are there, and fetch none.
"""

from pathlib import Path

import pytest

from scripts import script

real_models = script("benchmarks/real_models.py")

FILES: dict[str, Path] = {name: real_models.cached_file(name) for name in real_models.PUBLISHED}  # the user's own cache
NAMES = [
    pytest.param(
        name,
        marks=[
            pytest.mark.real,
            pytest.mark.skipif(
                not file.exists(), reason=f"python benchmarks/real_models.py {name} fetches {file.name}"
            ),
        ],
    )
    for name, file in FILES.items()
]
PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "Steps:\n\n1. Mix 250 g of flour with the eggs.\n\n2.",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 5, 8, 13,",
    "In 1969, 2 people walked on the Moon; in 1972,",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "<html>\n  <body>\n    <h1>",
    "$ git commit -m 'Fix the build'\n$ git",
    "# Introduction\n\nThis chapter",
    "words  with  double  spaces",
    "\n\nA text that begins with two newlines",
    "Ends with a space ",
    "It's what they'd said; we'll see if she's",
    "Über die Brücke gehen wir nach",
    "Жили-были старик со старухой у самого",
    "昔々、あるところに",
    "从前有一座山，山里有",
    "السلام عليكم ورحمة",
    "I love pizza 🍕 and 🚀",
    "👩‍👩‍👧 is a family; 🇫🇷 is",
    "E = mc² and ∑ x_i ≤ ∞, so",
    "THE QUICK BROWN FOX JUMPS OVER",
    "https://example.org/a?b=1&c=2 is",
    "She said: “Don’t go!” and he",
    "a a a a a a a a",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nWhat is the capital of Spain?<end_of_turn>\n<start_of_turn>model\n",
    "The recipe needs:\r\n\r\n* 2 cups of sugar\r\n*",
)
