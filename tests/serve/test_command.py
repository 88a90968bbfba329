"""``outrider serve`` as a process."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from servers import LIMIT_S

from pairs import random_llama, save, word_tokenizer


def test_serve_command(tmp_path: Path) -> None:
    """Clients see no folder of this machine. At SIGTERM running requests go on to their end, then the process ends."""
    target, draft = (str(tmp_path / name) for name in ("target", "poet-draft"))
    save(Path(target), random_llama(context_len=4096), word_tokenizer())
    save(Path(draft), random_llama(hidden_size=16, context_len=4096), word_tokenizer())
    arguments = ["serve", "--target", target, "--draft", draft, "--served-model-name", "poet", "--device", "cpu"]
    arguments += ["-k", "2", "--context", "512", "--port", "0"]
    arguments += ["--shutdown-timeout", "3600"]  # not to be a race against a busy machine
    code = "import sys; from outrider.cli.app import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not lines or " ready: " not in lines[-1]:
                lines.append(next(process.stderr))
            url = lines[-1].rpartition("ready: ")[2].split()[0]
            assert next(process.stderr).rstrip().endswith(f"speculative decoding: {url.removesuffix('/v1')}")
            assert any(f"loading poet: {target} with draft {draft}" in line for line in lines)
            assert any("drafts by poet-draft, K = 2" in line for line in lines)
            body = {"model": "poet", "prompt": "w3 w5 w8", "max_tokens": 8, "temperature": 0}
            with httpx.Client(base_url=url.removesuffix("/v1"), timeout=LIMIT_S, verify=False) as http:
                seen = [http.post(path, json=body) for path in ("/v1/completions", "/v1/race")]
                paths = ("/v1/models", "/metrics", "/v1/race/choices", "/tokenizer_info")
                seen += [http.get(path) for path in paths]
                assert "-poet+poet-draft-" in seen[0].json()["system_fingerprint"]
                assert all(one.status_code == 200 and str(tmp_path) not in one.text for one in seen)
                body = {"prompt": "w1", "max_tokens": 300, "seed": 1, "ignore_eos": True, "stream": True}
                with http.stream("POST", "/v1/completions", json=body) as response:
                    parts = response.iter_lines()
                    next(parts)
                    process.send_signal(signal.SIGTERM)
                    *_, last, done = (part for part in parts if part)
                assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
                assert done == "data: [DONE]"
                assert process.wait(LIMIT_S) == -signal.SIGTERM
                with pytest.raises(httpx.ConnectError):
                    http.get("/v1/models")
        finally:
            process.kill()
