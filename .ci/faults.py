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
    ("models/families/parts.py", "return int(config.sliding_window)", "return config.sliding_window + 1", "native"),
    # Scheduler and loop
    ("decoding/scheduler.py", "row.request.prompt_ids[:-1] if", "row.request.prompt_ids if", "decoding"),
    ("decoding/scheduler.py", "() if one.row.is_spoilt else one.held", "one.held", "decoding"),
    ("decoding/verify.py", "is_fed = (offsets <= num_drafted", "is_fed = (offsets < num_drafted", "decoding"),
    ("drafters/heads.py", "cached, lengths - 1)", "cached, lengths)", "drafters"),
    ("text/row_text.py", "max(0, before - len(string) + 1)", "before", "text decoding"),
    # Verdict
    ("certify/certificate.py", "is_enough and all(one.is_ok for one in self.controls)", "is_enough", "certify"),
    # Adaptive K
    ("decoding/schedule.py", "< _CHANGE * rates[load.usual_k]", "> _CHANGE * rates[load.usual_k]", "decoding"),
    # Files
    ("models/gguf/tensors.py", "lambda numbers: numbers - 1 for", "lambda numbers: numbers for", "models"),
    ("models/gguf/vocabulary.py", "(-scores[ids[text]], -len(text))", "-scores[ids[text]]", "models"),
    # Requests of the server
    ("serve/body.py", "                if given[other] != given[found[0]]:", "                if False:", "serve"),
    # Options, noise, seeds
    ("sampling/history.py", "ids[num_given:].bincount", "ids.bincount", "sampling"),
    ("sampling/noise.py", "_USE_NEXT = 1", "_USE_NEXT = 0", "sampling"),
    ("decoder.py", "self.constant_k if is_auto and is_fixed and depends_on_k else None", "None", "decoding"),
    # A slot that keeps NaN, drafts whose numbers are not their own, stop strings
    ("decoding/readback.py", "            row.is_spoilt = True\n", "", "decoding"),
    ("drafters/drawing.py", "rule.draw(q, noise.at(i))", "rule.draw(q, noise.at(0))", "drafters"),
    ("text/row_text.py", "min(ends, key=itemgetter(0))", "max(ends, key=itemgetter(0))", "text"),
    # Verdict, positions of a file, a server that fills up, long jobs that go on with other settings
    ("certify/certificate.py", "self.num_forbidden > 0 or", "self.num_forbidden > 1 or", "certify"),
    ("models/gguf/keys.py", "attention_factor * usual", "attention_factor", "models"),
    ("serve/admission.py", "            self._reserved.remove(client)", "            pass", "serve"),
    ("offline/output_file.py", 'line.source | line.labels | {"settings": _of_text(settings_of(line))}',
     "line.source | line.labels", "cli"),
    # The last ten are chosen without a look at the tests.
    # The race of `gumbel` leaves out blocks of 64 tokens that could still win. On CPUs, unlikely tokens of vocabularies
    # of more than 64 vanish from sampled text; with and without a draft alike, so that equality shows nothing.
    ("kernels/verdicts.cpp", "double(heaviest) * BLOCK <= best", "double(heaviest) <= best", "sampling"),
    # Noise made ahead outlives its sequence: the next request in the slot gets random numbers of the last one's seed.
    # Samples of one prompt with other seeds are copies of each other, and a seed no longer gives its text.
    ("decoding/runner.py", "        self._noise.invalidate()\n", "", "decoding"),
    # Without prefixes declared as common, all prefixes are: the count of cached tokens confirms a guess of what another
    # API key has sent.
    ("decoding/scheduler.py", "if client == row.client:", "if client == row.client or not self.common:",
     "decoding serve"),
    # q of a looked-up row is one-hot at the token of the drafter that did not draft: q is 0 at the drafted token, so
    # that each one with p > 0 is accepted. Another distribution above temperature 0; greedy texts stay right.
    ("drafters/hybrid.py", "certain_where(is_found, ids, probs)", "certain_where(is_found, other.ids, probs)",
     "drafters"),
    # States of the native engine, and windows of convolutions, have anchors but are not fed again: a prompt that shares
    # only a part of a cached text goes on from states that have read the rest of it. Wrong text in a second chat.
    ("runtime/cache.py", "return 0 if self.has_anchors and", "return 0 if self.has_states and",
     "runtime decoding native"),
    # The second half of a fused matrix (up, of Phi's or an expert's gate_up) takes the scales of the first half's rows:
    # wrong logits of an int8 model, nothing wrong in float32 or in blocks.
    ("native/weights.py", "scales.data_ptr() + first * scales.itemsize", "scales.data_ptr()", "native"),
    # Layers 0, 6, 12 ... see all of the text instead of 5, 11, 17 ... (Gemma 3, gpt-oss, Olmo 3 from files that state a
    # period or none). The model loads and talks, with windows (and rope bases) in the wrong layers.
    ("models/gguf/keys.py", "(i + 1) % pattern != 0", "i % pattern != 0", "models"),
    # A control that was missed is excused though it deviates by more than is negligible, or than the tests would see: a
    # certificate of a sample that is too small passes, where it must be inconclusive.
    ("certify/run.py", "most < min(NEGLIGIBLE_TV, statistical.detectable)",
     "most < max(NEGLIGIBLE_TV, statistical.detectable)", "certify"),
    # Zeros in the middle of an output file, as a power loss leaves them, are taken for its end: all finished rows after
    # them are cut off when the run is resumed.
    ("offline/output_file.py", "is_last=not lines.read(1)", "is_last=True", "cli"),
    # Rolling back a drafted end of thoughts gives a token of the budget back, though the marker took none: with a draft
    # the thoughts are longer than the budget (and than without a draft), by one for each such rejection.
    ("text/thinking.py", 'self._stage == after == "in"', 'self._stage == "in"', "text"),
    # Requests that still wait for a (larger) engine are dropped without a word when the engine fails or the session is
    # closed: their streams wait forever.
    ("requests/engine_loop.py", "ended = [*self._rows.values(), *self._arriving]", "ended = [*self._rows.values()]",
     "requests decoding"),
    # A stream of an engine that is gone, closed late, cancels the row of another caller that has its number in the new
    # engine: that caller's stream never ends.
    ("requests/engine_loop.py", "elif self._rows.get(state.index) is state:", "elif state.index in self._rows:",
     "requests decoding"),
    # With several prompts and n > 1, choices of completions come with the prompt_logprobs of another prompt.
    ("serve/choices.py", "found[index // self.ask.body.n]", "found[index % len(found)]", "serve"),
    # Anthropic's tool_choice.disable_parallel_tool_use is silently ignored: several calls where one was demanded.
    ("serve/tools.py", " or (isinstance(choice, Choice) and choice.disable_parallel_tool_use)", "", "serve"),
    # A call of a tool that a stop string has cut is reported as completed (responses): the client runs it with half of
    # its arguments.
    ("serve/answers.py", 'is_cut=reason == "length" or self.parser.is_in_call', 'is_cut=reason == "length"', "serve"),
    # A string that ends in an escaped backslash ("C:\\") does not end: the call is never complete, and the brackets,
    # markers and text after it end up in its arguments.
    ("text/output_parser.py", 'part == "\\\\" and not self._is_escaped', 'part == "\\\\"', "text serve"),
    # Taking back a draft that has gone beyond the end of a structure takes back too many tokens of the matcher: wrong
    # masks, output that does not match the schema, or an error; only with a draft.
    ("text/structure.py", "self._matcher.rollback(num_tokens - num_beyond)", "self._matcher.rollback(num_tokens)",
     "text decoding"),
    # Every K is replayed with the drafts of the first one (look-ups, heads): the same tau for each K, so that users
    # choose a wrong K.
    ("measure/replay.py", "by_k[k if lm is None else first]", "by_k[first]", "measure"),
    # The two accounts of a bet are added, not averaged: all p-values are half as large, twice as many false alarms.
    ("certify/evidence.py", "return float(np.logaddexp(sides[0], sides[1])) - math.log(2)",
     "return float(np.logaddexp(sides[0], sides[1]))", "certify"),
    # Heads of SpecForge and ModelOpt (eagle_config) read the hidden states of the layers before theirs: lossless, but
    # hardly a draft is accepted.
    ("models/heads/chains.py", "tuple(i + 1 for i in inner.get(LAYER_IDS) or ())", "tuple(inner.get(LAYER_IDS) or ())",
     "models"),
    # A temperature of 0 (or another option of 0) that a checkpoint states is dropped: it samples where its authors mean
    # greedy.
    ("models/sampling_defaults.py", "if document.get(name) is not None}", "if document.get(name)}", "models"),
    # A slot's suffix index outlives its sequence: a new request is drafted from the last client's text, and the seed
    # alone no longer gives the output.
    ("drafters/lookups.py", "if index.num_tokens > num_tokens:", "if index.num_tokens > num_tokens > 0:",
     "drafters decoding"),
    # Training sees the held-out sequences, too: alpha, the prediction and the choice of the best weights flatter a
    # draft that has learnt them by heart.
    ("distill/data.py", "return written[:-num_held], [", "return written, [", "distill"),
    # The second and later forwards of a long prompt (above PREFILL_TOKENS, all rows together) see too short a view of
    # the cache: wrong output after long prompts, or an error; short ones stay right.
    ("runtime/lm.py", "self.view_len(latest + offset + width, cache)", "self.view_len(latest + width, cache)",
     "runtime decoding"),
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
