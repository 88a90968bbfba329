"""A page with Gradio: the text as it comes, accepted tokens in colour.

pip install gradio
python examples/gradio_demo.py [TARGET DRAFT]

``outrider serve`` shows a race of plain and speculative decoding on its own page.
"""

import sys
from collections.abc import Iterator

import gradio as gr

import outrider

DECODER = outrider.load(*(sys.argv[1:] or ("fable", "fable-draft")))


def story(begin: str, temperature: float, seed: float) -> Iterator[tuple[list[tuple[str, str | None]], str]]:
    """Yield the text so far, each part with its origin, and tokens per round."""
    parts: list[tuple[str, str | None]] = [(begin, None)]
    stats = None
    for chunk in DECODER.stream(begin, temperature=temperature, seed=int(seed), max_new_tokens=80):
        parts += chunk.pieces
        stats = chunk.stats if stats is None else stats + chunk.stats
        yield parts, f"{stats.mean_acceptance_length:.2f} tokens per round"


demo = gr.Interface(
    story,
    [
        gr.Textbox("Once upon a time", label="Begin"),
        gr.Slider(0, 1.5, 0.7, label="Temperature"),
        gr.Number(1, label="Seed", precision=0),
    ],
    [
        gr.HighlightedText(label="Story", combine_adjacent=True, color_map={"accepted": "green"}),
        gr.Textbox(label="tau"),
    ],
    title="Outrider",
)

if __name__ == "__main__":
    demo.launch()
