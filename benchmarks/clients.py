"""Clients that people use, against a server of the embedded pair: do they get the library's own text?

    python benchmarks/clients.py --python PYTHON --aiperf PROGRAM --node-modules FOLDER [--seconds 60]

PYTHON has litellm, llm and langchain-openai, FOLDER the npm package openai; they are not among Outrider's own
dependencies, and belong in an environment of their own. Each client generates with a seed: a completion or a chat,
whole and streamed, and its text must be that which httpx gets. Then AIPerf sends a load, and must count no errors and
find the figures of the drafts. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from outrider.bench.report import new_table
from outrider.models.registry import resolve
from outrider.system.provenance import provenance

_PROMPT, _SEED, _NUM_TOKENS = "Once upon a time there was a", 3, 40
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_LIMIT_S = 120.0

# Each prints one JSON array: its version, and its texts.
_LITELLM = """
import json, os
from importlib.metadata import version
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
one = dict(model="openai/fable", api_base=URL, api_key="none", seed=SEED, max_tokens=N, temperature=1)
chat = dict(one, messages=[{"role": "user", "content": PROMPT}])
whole = litellm.completion(**chat).choices[0].message.content
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**chat, stream=True)]
text = litellm.text_completion(**dict(one, model="text-completion-openai/fable"), prompt=PROMPT).choices[0].text
print(json.dumps([version("litellm"), whole, "".join(parts), text]))
"""
_LANGCHAIN = """
import asyncio, json
from importlib.metadata import version
from langchain_openai import ChatOpenAI, OpenAI
chat = ChatOpenAI(model="fable", base_url=URL, api_key="none", seed=SEED, max_tokens=N, temperature=1)
whole = chat.invoke(PROMPT)
assert whole.usage_metadata["output_tokens"] == N
parts = [chunk.content for chunk in chat.stream(PROMPT)]
async def read():
    return "".join([chunk.content async for chunk in chat.astream(PROMPT)])
texts = [one.content for one in chat.batch([PROMPT] * 8)]
llm = OpenAI(model="fable", base_url=URL, api_key="none", seed=SEED, max_tokens=N, temperature=1)
texts += [whole.content, "".join(parts), asyncio.run(read()), llm.invoke(PROMPT)]
print(json.dumps([version("langchain-openai"), *texts]))
"""
_LLM = """
import json, pathlib, subprocess, sys, os
from importlib.metadata import version
model = {"model_id": "fable", "model_name": "fable", "api_base": URL}
pathlib.Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(json.dumps([model]))
options = ["-m", "fable", "-o", "seed", str(SEED), "-o", "max_tokens", str(N), "-o", "temperature", "1", PROMPT]
def ask(*more):
    command = [sys.executable, "-m", "llm", "prompt", *more, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.removesuffix("\\n")
print(json.dumps([version("llm"), ask(), ask("--no-stream")]))
"""
_NODE = """
import OpenAI from "openai";
import { readFileSync } from "node:fs";
const client = new OpenAI({ baseURL: URL_, apiKey: "none", maxRetries: 0 });
const one = { model: "fable", seed: SEED, max_tokens: N };
const chat = { ...one, messages: [{ role: "user", content: PROMPT }] };
const whole = await client.chat.completions.create(chat);
let parts = "";
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...chat, ...options }))
  parts += chunk.choices[0]?.delta?.content ?? "";
let text = "";
for await (const chunk of await client.completions.create({ ...one, prompt: PROMPT, stream: true }))
  text += chunk.choices[0].text;
// Leaving a loop ends the connection, and with it the text.
const endless = { model: "fable", prompt: PROMPT, max_tokens: 400, ignore_eos: true, stream: true };
for (let i = 0; i < 20; i++) for await (const chunk of await client.completions.create(endless)) break;
try { await client.completions.create({ ...one, prompt: PROMPT, temperature: -1 }); }
catch (error) { if (!(error instanceof OpenAI.BadRequestError && error.param === "temperature")) throw error; }
const version = JSON.parse(readFileSync("node_modules/openai/package.json")).version;
console.log(JSON.stringify([version, whole.choices[0].message.content, parts, text]));
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--aiperf", required=True)
    parser.add_argument("--node-modules", required=True)
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    # Clients run in other folders. (Not resolved: the link to an interpreter tells its environment.)
    places = arguments.python, arguments.aiperf, arguments.node_modules
    python, aiperf, modules = (str(Path(place).absolute()) for place in places)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Path(folder)
        url = stack.enter_context(_server(_model(work / "fable")))
        expected = _expected(url)
        clients: dict[str, Callable[[], list[str]]] = {
            "openai (node)": lambda: _node(url, Path(modules)),
            "litellm": lambda: _script(python, _LITELLM, url, work),
            "langchain-openai": lambda: _script(python, _LANGCHAIN, url, work),
            "llm": lambda: _script(python, _LLM, url, work),
        }
        for name, run in clients.items():
            version, *texts = run()
            is_right = all(text.strip() == expected.strip() for text in texts)
            rows.append({"client": name, "version": version, "result": f"{len(texts)} texts", "is_right": is_right})
        assert _is_idle(url), "a client has left a slot taken"
        rows.append(_aiperf(aiperf, url, work, arguments.seconds))
        assert _is_idle(url)
    console = Console(width=100)
    table = new_table("", "client", "version", "result", "as it should be")
    for row in rows:
        table.add_row(row["client"], row["version"], row["result"], "yes" if row["is_right"] else "NO")
    console.print(table)
    print(json.dumps({"provenance": provenance("cpu"), "clients": rows}))
    if not all(row["is_right"] for row in rows):
        sys.exit(1)


def _model(folder: Path) -> Path:
    """The embedded target with a chat template: the messages, one after the other."""
    path = resolve("fable").path
    assert path is not None
    shutil.copytree(path, folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


@contextlib.contextmanager
def _server(target: Path) -> Any:
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from outrider.cli.app import main; main()", "serve", "--target", str(target)]
    command += ["--draft", "fable-draft", "--served-model-name", "fable", "--device", "cpu", "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                assert process.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def _expected(url: str) -> str:
    body = {"prompt": _PROMPT, "seed": _SEED, "max_tokens": _NUM_TOKENS}
    text: str = httpx.post(f"{url}/v1/completions", json=body, timeout=_LIMIT_S).json()["choices"][0]["text"]
    return text


def _is_idle(url: str) -> bool:
    for _ in range(50):
        if "outrider:num_free_slots 8.0" in httpx.get(f"{url}/metrics").text:
            return True
        time.sleep(0.1)
    return False


def _script(python: str, script: str, url: str, work: Path) -> list[str]:
    names = f"URL, SEED, N, PROMPT = {f'{url}/v1'!r}, {_SEED}, {_NUM_TOKENS}, {_PROMPT!r}\n"
    environment = os.environ | {"LLM_USER_PATH": str(work), "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)
    return _last_line([python, "-c", names + script], environment, work)


def _node(url: str, modules: Path) -> list[str]:
    names = f"const URL_ = {json.dumps(f'{url}/v1')}, SEED = {_SEED}, N = {_NUM_TOKENS};"
    names += f"const PROMPT = {json.dumps(_PROMPT)};"
    imports, rest = _NODE.strip().split("\nconst client", 1)
    script = f"{imports}\n{names}\nconst client{rest}"
    return _last_line(["node", "--input-type=module", "-e", script], dict(os.environ), modules.parent)


def _last_line(command: list[str], environment: dict[str, str], folder: Path) -> list[str]:
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _aiperf(program: str, url: str, work: Path, seconds: int) -> dict[str, Any]:
    command = [program, "profile", "-m", "fable", "--url", url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", _as_from_the_hub(work), "--concurrency", "8", "--benchmark-duration", str(seconds)]
    command += ["--isl", "64", "--osl", "64", "--ui", "none", "--artifact-dir", str(work / "aiperf")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(work / "hub")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, env=environment, cwd=work, capture_output=True, text=True, timeout=seconds + _LIMIT_S
    )
    files = list((work / "aiperf").rglob("profile_export_aiperf.json"))
    if done.returncode or not files:
        raise RuntimeError(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    found = json.loads(files[0].read_text())
    num_requests = int(found["request_count"]["avg"])
    num_errors = int((found.get("error_request_count") or {"avg": 0})["avg"])
    about = {name: value for name, value in found.items() if "accept" in name or "spec" in name}
    rate = found["output_token_throughput"]["avg"]
    version = subprocess.run([program, "--version"], capture_output=True, text=True, env=environment).stdout.split()
    return {
        "client": "aiperf",
        "version": version[-1] if version else "",
        "result": f"{num_requests} chats in {seconds} s, {num_errors} errors, {rate:.0f} tokens/s",
        "is_right": num_requests > 0 and num_errors == 0 and bool(about),
        "drafts": about,
    }


def _as_from_the_hub(work: Path) -> str:
    """A name for the tokenizer, since AIPerf takes no folder: the hub's cache, as if it had been there."""
    cache, commit = work / "hub" / "models--outrider--fable", "0" * 40
    for name in ("refs", "snapshots"):
        (cache / name).mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    (cache / "snapshots" / commit).symlink_to(work / "fable")
    return "outrider/fable"


if __name__ == "__main__":
    main()
