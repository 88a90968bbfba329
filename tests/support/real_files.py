"""The published files that benchmarks/real_models.py fetches (tests fetch none), and short prompts for them."""

from pathlib import Path

import pytest

from scripts import script

real_models = script("benchmarks/real_models.py")

# Of which llama.cpp's results are golden, in the user's own cache:
FILES: dict[str, Path] = {name: real_models.cached_file(name) for name in ("smollm2", "gemma3")}
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
    "Steps:\n\n1. Mix 250 g of flour with the eggs.\n\n2.",
    "1, 2, 3, 5, 8, 13,",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "$ git commit -m 'Fix the build'\n$ git",
    "words  with  double  spaces",
    "\n\nA text that begins with two newlines",
    "It's what they'd said; we'll see if she's",
    "Жили-были старик со старухой у самого",
    "昔々、あるところに",
    "السلام عليكم ورحمة",
    "👩‍👩‍👧 is a family; 🇫🇷 is",
    "She said: “Don’t go!” and he",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nWhat is the capital of Spain?<end_of_turn>\n<start_of_turn>model\n",
)
