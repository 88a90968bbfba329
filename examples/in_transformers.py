"""Your own call of ``model.generate``, with a draft: one argument more.

python examples/in_transformers.py [TARGET DRAFT]

Greedy output is that of plain ``generate``, token for token; samples follow the same distribution. Logits processors,
stopping criteria and batches stay as they are (the page "In Transformers" tells what is refused).
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider

ZOO = Path(outrider.__file__).parent / "models" / "zoo"  # the embedded pair, as folders
TARGET, DRAFT = sys.argv[1:] or (ZOO / "fable", ZOO / "fable-draft")

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto").eval()
draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype="auto").eval()
inputs = tokenizer("Once upon a time", return_tensors="pt")

fast = outrider.assisted(draft, num_draft_tokens=4)  # keep it: it prepares both models once
plain_ids = target.generate(**inputs, do_sample=False, max_new_tokens=32)
fast_ids = target.generate(**inputs, do_sample=False, max_new_tokens=32, custom_generate=fast)
print(tokenizer.decode(fast_ids[0]))
print("equal to plain generate:", torch.equal(plain_ids, fast_ids))

torch.manual_seed(0)
sampled = target.generate(**inputs, do_sample=True, top_p=0.9, max_new_tokens=32, custom_generate=fast)
print(tokenizer.decode(sampled[0]))
