"""Small faults, one at a time, and whether the tests of the folders that they concern find them.

python .ci/faults.py [NUMBER ...]

Run in a clean clone, whose files are changed and restored. Each fault is a line, what replaces it, and folders.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "outrider"
FAULTS = [
    # Rules
    ("sampling/rules.py", "(accept * q_x < p_x)", "(accept * q_x < 1.05 * p_x)", "sampling"),
    ("sampling/rules.py", "rest = (p - q).clamp_min_(0.0)", "rest = (p - q).abs_()", "sampling"),
    ("sampling/rules.py", "/ q_x[:, i]).clamp_max(1.0)", "/ q_x[:, i]).clamp_max(1.2)", "sampling"),
    ("sampling/rules.py", "(draft.ids == target_ids[:, :-1]) & _is_drafted(draft)", "draft.ids == target_ids[:, :-1]",
     "sampling decoding"),
    # Probabilities
    ("sampling/probs.py", "    is_cut[..., -1] = False  #", "    #", "sampling"),
    ("sampling/probs.py", "index = (top_k - 1)", "index = top_k", "sampling"),
    ("sampling/probs.py", "torch.where(x < 0, x * penalty, x / penalty)", "x / penalty", "sampling"),
    # Cache
    ("runtime/cache.py", "torch.where(positions < 0, self.capacity, positions)", "positions.clamp_min(0)",
     "runtime decoding"),
    ("runtime/cache.py", "return min(num_tokens, int(self.anchors[slot])) if self.has_states else num_tokens",
     "return num_tokens", "decoding"),
    ("native/parts.py", "return config.sliding_window  #", "return config.sliding_window + 1  #", "native"),
    # Scheduler and loop
    ("decoding/scheduler.py", "row.request.prompt_ids[:-1] if", "row.request.prompt_ids if", "decoding"),
    ("decoding/scheduler.py", "() if one.row.is_spoilt else one.held", "one.held", "decoding"),
    ("decoding/verify.py", "is_fed = (offsets <= num_drafted", "is_fed = (offsets < num_drafted", "decoding"),
    ("drafters/chains.py", "cached, lengths - 1)", "cached, lengths)", "drafters"),
    ("text/row_text.py", "max(0, before - len(string) + 1)", "before", "text decoding"),
    # Verdict
    ("certify/certificate.py", "is_enough and all(one.is_ok for one in self.controls)", "is_enough", "certify"),
    # Adaptive K
    ("decoding/schedule.py", "< _CHANGE * rates[load.usual_k]", "> _CHANGE * rates[load.usual_k]", "decoding"),
    # Files
    ("models/gguf/family.py", "return numbers - 1\n", "return numbers\n", "models"),
    ("models/gguf/vocabulary.py", "(-scores[ids[text]], -len(text))", "-scores[ids[text]]", "models"),
    # Requests of the server
    ("serve/body.py", "                if given[other] != given[found[0]]:", "                if False:", "serve"),
    # Of all of these one more: options, noise, seeds
    ("sampling/history.py", "ids[num_given:].bincount", "ids.bincount", "sampling"),
    ("sampling/noise.py", "_USE_NEXT = 1", "_USE_NEXT = 0", "sampling"),
    ("decoder.py", "self.constant_k if is_auto and is_fixed and depends_on_k else None", "None", "cli"),
    # Prefixes of another client; a draft's q; stop strings
    ("decoding/scheduler.py", "        if client == row.client:", "        if True:", "decoding"),
    ("drafters/hybrid.py", "torch.where(is_found[:, None, None], certain, probs)", "probs", "drafters"),
    ("text/row_text.py", "min(ends, key=itemgetter(0))", "max(ends, key=itemgetter(0))", "text"),
    # Verdict, windows of a file, a server that fills up, long jobs that go on with other settings
    ("certify/certificate.py", "self.num_forbidden > 0 or", "self.num_forbidden > 1 or", "certify"),
    ("models/gguf/keys.py", "(i + 1) % pattern != 0", "i % pattern != 0", "models"),
    ("serve/admission.py", "            self._reserved.remove(client)", "            pass", "serve"),
    ("offline/output_file.py", 'line.source | line.labels | {"settings": _of_text(settings_of(line))}',
     "line.source | line.labels", "cli"),
]  # fmt: skip


def main() -> None:
    numbers = list(map(int, sys.argv[1:])) or range(len(FAULTS))
    for number in numbers:
        name, old, new, folders = FAULTS[number]
        path = SRC / name
        text = path.read_text()
        assert text.count(old) == 1, (name, old)
        tests = [str(ROOT / "tests" / folder) for folder in folders.split()]
        begin_s = time.monotonic()
        try:
            path.write_text(text.replace(old, new))
            command = [sys.executable, "-m", "pytest", "-x", "-q", *tests]
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True
            )
        finally:
            path.write_text(text)
        failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        verdict = "found" if failed else "NOT FOUND" if done.returncode == 0 else "no verdict"
        print(
            f"{number:2} {verdict:10} {time.monotonic() - begin_s:5.0f} s  {name}: {new.strip()}  {failed}", flush=True
        )


if __name__ == "__main__":
    main()
