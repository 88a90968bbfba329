"""LangChain on ``outrider serve``: its own class for OpenAI's API, with another address.

pip install langchain-openai
outrider serve --target fable --draft fable-draft          # in another terminal; any pair
python examples/langchain_stories.py [URL]

A target with a chat template serves ``ChatOpenAI`` in the same way, with tools and structured output.
"""

import sys

from langchain_core.prompts import PromptTemplate
from langchain_openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"

llm = OpenAI(base_url=URL, api_key="none", model="fable", temperature=0.7, max_tokens=32, seed=1)
chain = PromptTemplate.from_template("Once upon a time there was a {animal}") | llm
for text in chain.stream({"animal": "fox"}):
    print(text, end="", flush=True)
print()
for text in chain.batch([{"animal": "hen"}, {"animal": "wolf"}]):  # one batch in the server
    print("*", text.strip()[:60])
