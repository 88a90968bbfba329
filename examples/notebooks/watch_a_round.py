# %% [markdown]
# # Watch a round
#
# A round drafts K tokens, verifies them in one forward of the target, and commits some of them and one more. Here is
# each round of a short text: drafted tokens with their probabilities under target (p) and draft (q), and their fate.

# %%
import outrider

decoder = outrider.load("fable", "fable-draft", num_draft_tokens=4, acceptance="rejection")


def show(token_id: int) -> str:
    """Show a token as text."""
    return repr(decoder.tokenizer.decode([token_id]))


# %% [markdown]
# `reports_drafts` lists all drafted tokens, also those that were rejected. Under `rejection` a token is accepted with
# probability min(1, p/q), each by itself; after the first rejection the rest of the draft is dropped.

# %%
total = outrider.Stats()
for number, chunk in enumerate(decoder.stream("Once upon a time", seed=5, max_new_tokens=24, reports_drafts=True)):
    print(f"round {number}")
    for place, (token_id, p, q) in enumerate(chunk.drafted):
        fate = "accepted" if place < chunk.num_accepted else "rejected" if place == chunk.num_accepted else "dropped"
        print(f"    {show(token_id):12} p = {p:.3f}  q = {q:.3f}  min(1, p/q) = {min(1, p / q):.3f}  {fate}")
    if chunk.origins[-1] != "accepted":
        print(f"    {show(chunk.token_ids[-1]):12} {chunk.origins[-1]}")
    total += chunk.stats

# %% [markdown]
# The `correction` after a rejection comes from the residual (p - q)+; the `bonus` after a full acceptance from p. Each
# round yields one of them, so that a round is never slower than plain decoding in tokens.

# %%
print(f"{total.num_generated_tokens} tokens in {total.num_rounds} rounds: tau = {total.mean_acceptance_length:.2f}")
for accepted, rounds in enumerate(total.acceptance_histogram):
    print(f"{accepted} accepted: {'#' * int(rounds)}")
