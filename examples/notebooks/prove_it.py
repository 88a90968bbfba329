# %% [markdown]
# # Prove it
#
# "The output follows the target's distribution" is a theorem about the rule, and a property of the program. Here is
# the theorem on two distributions, then the program on small ones by counting, then a certificate of your own pair.

# %% [markdown]
# ## The rule
#
# A token drawn from q is accepted with probability min(1, p/q). After a rejection one is drawn from the residual
# (p - q)+, normalised. Together: min(p, q) + (1 - sum of min(p, q)) * residual = p, to the last bit or two.

# %%
import numpy as np

rng = np.random.default_rng(0)
p, q = rng.dirichlet(np.ones(8)), rng.dirichlet(np.ones(8))
accepted = np.minimum(p, q)
residual = np.maximum(p - q, 0)
residual /= residual.sum()
output = accepted + (1 - accepted.sum()) * residual
print(f"alpha = {accepted.sum():.3f}, largest difference from p: {abs(output - p).max():.1e}")

# %% [markdown]
# ## A wrong rule
#
# Take the residual away, and draw the correction from p itself: it looks right, and is not.

# %%
wrong = accepted + (1 - accepted.sum()) * p
print(f"total variation of the wrong rule: {abs(wrong - p).sum() / 2:.3f}")

# %% [markdown]
# ## The same seed, the same text
#
# Under the rule `gumbel` the output with a draft is that of plain decoding with the same seed, token for token: anyone
# can check it on any pair, without statistics.

# %%
import outrider

decoder = outrider.load("fable", "fable-draft", acceptance="gumbel")
for seed in range(3):
    (fast,) = decoder.generate("Once upon a time", seed=seed, max_new_tokens=24)
    (plain,) = decoder.plain().generate("Once upon a time", seed=seed, max_new_tokens=24)
    assert fast.token_ids == plain.token_ids
    print(f"seed {seed}: {fast.stats.num_rounds} rounds instead of {plain.stats.num_rounds}: {fast.text!r}")

# %% [markdown]
# ## A certificate
#
# `certify` tests the rule with the pair's own p and q by enumeration, then samples of the real loop, and makes
# deliberate mistakes that it must detect. It states the smallest deviation that it would have seen: with more tokens, a
# smaller one. For your pair leave both options out.

# %%
import subprocess
import sys

command = [sys.executable, "-m", "outrider", "certify", "--num-tokens", "200", "-n", "16"]
done = subprocess.run(command, capture_output=True, text=True, check=False)
print(done.stdout or done.stderr)
