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
    "The three primary colours are",
    "Steps:\n\n1. Mix 250 g of flour with the eggs.\n\n2.",
    "Shopping list:\n- milk\n- eggs\n-",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 17 + 25?\nA:",
    "1, 2, 3, 5, 8, 13,",
    "3.14159265358979",
    "In 1969, 2 people walked on the Moon; in 1972,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "for (int i = 0; i < 10; i++) {\n\t",
    "SELECT name, COUNT(*) FROM users WHERE",
    "<html>\n  <body>\n    <h1>",
    '{"name": "Ada", "age": 36, "languages": [',
    "$ git commit -m 'Fix the build'\n$ git",
    "| city | country |\n|---|---|\n| Paris |",
    "# Introduction\n\nThis chapter",
    "  two leading spaces and then",
    " One leading space",
    "words  with  double  spaces",
    "Tabs\tbetween\twords\tand",
    "A line that ends in a newline.\n",
    "\n\nA text that begins with two newlines",
    "Ends with a space ",
    "It's what they'd said; we'll see if she's",
    "Café, naïve, façade, jalapeño and",
    "Über die Brücke gehen wir nach",
    "Il était une fois, dans un petit village,",
    "Había una vez un rey que",
    "Жили-были старик со старухой у самого",
    "昔々、あるところに",
    "从前有一座山，山里有",
    "옛날 옛적에 호랑이가",
    "अथ कथा: एक बार एक",
    "السلام عليكم ورحمة",
    "I love pizza 🍕 and 🚀",
    "👩‍👩‍👧 is a family; 🇫🇷 is",
    "E = mc² and ∑ x_i ≤ ∞, so",
    "THE QUICK BROWN FOX JUMPS OVER",
    "camelCase, snake_case, kebab-case and",
    "https://example.org/a?b=1&c=2 is",
    "To be, or not to be... that is --",
    "She said: “Don’t go!” and he",
    "a a a a a a a a",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nWhat is the capital of Spain?<end_of_turn>\n<start_of_turn>model\n",
    "The recipe needs:\r\n\r\n* 2 cups of sugar\r\n*",
)
