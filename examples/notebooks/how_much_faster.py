# %% [markdown]
# # How much faster is my pair?
#
# On your machine, with your prompts, fairly measured: the same loop with an empty draft is the baseline, the arms take
# turns, and the formula that predicts the speed-up is checked against the clock. For your own pair change `PAIR`; for
# the full measurement, with intervals, run `outrider compare` and `outrider latency`.

# %%
import statistics
import time

import outrider

PAIR = ("fable", "fable-draft")
PROMPTS = ["Once upon a time", "The king said to his youngest son", "The fox and the hen"]
K = 3

decoder = outrider.load(*PAIR, num_draft_tokens=K)
arms = {"plain": decoder.plain(), "speculative": decoder}

# %% [markdown]
# ## Against the clock
#
# One run of each arm is thrown away (first calls are slow), then they take turns, so that a machine that slows down
# slows both. The median of the ratios is robust against a disturbed run.


# %%
def run(arm: outrider.Decoder, seed: int) -> tuple[float, list[outrider.Completion]]:
    """Tokens per second of a batch of one, prompt after prompt."""
    began = time.perf_counter()
    found = [one for prompt in PROMPTS for one in arm.generate(prompt, seed=seed, max_new_tokens=32, ignore_eos=True)]
    return sum(len(one.token_ids) for one in found) / (time.perf_counter() - began), found


speeds: dict[str, list[float]] = {name: [] for name in arms}
completions = []
for seed in range(5):
    for name, arm in arms.items():
        speed, found = run(arm, seed)
        if seed > 0:
            speeds[name].append(speed)
            completions += found if name == "speculative" else []
for name, values in speeds.items():
    print(f"{name:12} {statistics.median(values):7.1f} tokens/s")
measured = statistics.median(b / a for a, b in zip(*speeds.values(), strict=True))
print(f"speed-up     {measured:7.2f}")

# %% [markdown]
# ## Why?
#
# A round yields `tau` tokens. It costs `K c + v` plain steps, where `c` is the cost of a step of the draft and `v` that
# of a forward of the target over K + 1 tokens. The speed-up is tau / (K c + v): a draft pays if it is cheap (`c`), if
# it often agrees (`tau`), and if K + 1 tokens cost the target hardly more than one (`v`).

# %%
stats = sum((one.stats for one in completions), outrider.Stats())
print(f"tau = {stats.mean_acceptance_length:.2f}, {stats.draft_acceptance_rate:.0%} of drafted tokens are accepted")

plain = list(arms["plain"].stream(PROMPTS[0], seed=1, max_new_tokens=48, ignore_eos=True))
fast = list(arms["speculative"].stream(PROMPTS[0], seed=1, max_new_tokens=48, ignore_eos=True))
step_s = statistics.median(chunk.timing.verify_s for chunk in plain[1:])
c = statistics.median(chunk.timing.draft_s for chunk in fast[1:]) / K / step_s
v = statistics.median(chunk.timing.verify_s for chunk in fast[1:]) / step_s
print(f"c = {c:.2f}, v = {v:.2f}: predicted speed-up {stats.mean_acceptance_length / (K * c + v):.2f}")

# %% [markdown]
# The embedded draft is a third of its target, so that there is little to gain. If the prediction is below
# 1, no K helps: take another draft (the next notebook), or none.
