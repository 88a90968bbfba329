"""LiteLLM on ``outrider serve``: the provider of OpenAI's completions, with another address.

pip install litellm
outrider serve --target fable --draft fable-draft          # in another terminal; any pair
python examples/litellm_stories.py [URL]

In a proxy's configuration: ``model: text-completion-openai/fable``, ``api_base: URL``. A target with a chat template is
``hosted_vllm/NAME``.
"""

import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else a list of prices is fetched at import
import litellm  # noqa: E402

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"

chunks = litellm.text_completion(
    model="text-completion-openai/fable",
    api_base=URL,
    api_key="none",
    prompt="Once upon a time",
    temperature=0.7,
    max_tokens=32,
    seed=1,
    stream=True,
)
for chunk in chunks:
    print(chunk.choices[0].text or "", end="", flush=True)
print()
