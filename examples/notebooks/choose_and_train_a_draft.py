# %% [markdown]
# # Choose a draft, and train one
#
# First a question about logits alone: how far do target and draft agree? Then a draft is trained for the target, from
# the target's own output, and the two are compared. Commands do all of it (`outrider plan`, `outrider distill`); they
# are called from here.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
TARGET = "fable"


def outrider(command: str, *arguments: object) -> dict:
    """Run a command, and read its JSON document."""
    document = FOLDER / f"{command}.json"
    call = [sys.executable, "-m", "outrider", command, *map(str, arguments), "--json", str(document)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    print(done.stdout if done.returncode == 0 else done.stderr)
    done.check_returncode()
    return json.loads(document.read_text())


# %% [markdown]
# ## Train one
#
# A small model, or a head on the target's hidden states (`--kind eagle3`). Here it is a model of one narrow
# layer, trained for a few steps, so that it takes seconds. For a real draft leave `--steps` out and give it
# `--minutes 60`, your own text with `--data`, and a GPU. An interrupted run resumes.

# %%
trained = FOLDER / "my-draft"
outrider(
    *("distill", TARGET, "--output", trained, "--layers", 1, "--hidden-size", 128, "--written", 16, "--length", 64),
    *("--steps", 8, "--batch-size", 4),
)

# %% [markdown]
# ## Choose
#
# `plan` times the steps of every draft, measures its acceptance on output of the target, and predicts the speed-up at
# every K. It may recommend none: look-ups (`ngram`, `suffix`) cost nothing, and help only where the text repeats
# itself. The embedded draft was trained for half an hour, yours for some steps.

# %%
drafts = [option for draft in ("fable-draft", trained, "ngram") for option in ("--draft", draft)]
plan = outrider("plan", "--target", TARGET, *drafts, "-k", "1-4", "-n", 16)
