"""Real clients against a real server: each has a conversation with a tool.

    python -m venv A && A/bin/pip install openai-agents langchain-openai pydantic-ai-slim[openai]
    python -m venv B && B/bin/pip install litellm mcp    # these three want other versions of openai
    python -m venv C && C/bin/pip install llm
    python -m venv D && D/bin/pip install instructor anthropic
    npm install --prefix NODE openai
    python benchmarks/clients.py {A,B,C,D}/bin/python --node NODE

The model is tiny and random, so that grammars alone give its output sense: a call of the tool, then an answer. Each
client runs in a process of its own, since their environments are not Outrider's. Prints a table; exits with 1 if a
client failed.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

ASK = "What is the weather in Rome?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "<assistant>"
)
NODE = """
import OpenAI from "openai";
import fs from "node:fs";
const { url, ask, schema } = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: url, apiKey: "none" });
const tools = [{ type: "function", function: { name: "weather", parameters: schema, strict: true } }];
const messages = [{ role: "user", content: ask }];
const body = { model: "toy", messages, tools, max_tokens: 300 };
const stream = client.chat.completions.stream({ ...body, tool_choice: "required", parallel_tool_calls: false });
const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
const city = JSON.parse(message.tool_calls[0].function.arguments).city;
messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "Sun in " + city });
const answer = await client.chat.completions.create({ ...body, tool_choice: "none", max_tokens: 20 });
const kinds = [];
const flat = [{ type: "function", name: "weather", parameters: schema, strict: true }];
const events = await client.responses.create(
  { model: "toy", input: ask, tools: flat, tool_choice: "required", parallel_tool_calls: false, stream: true });
for await (const event of events) kinds.push(event.type);
if (!["Rome", "Oslo"].includes(city) || finish_reason !== "tool_calls" || answer.choices.length !== 1) process.exit(1);
if (kinds.at(-1) !== "response.completed") process.exit(1);
console.log(JSON.parse(fs.readFileSync("node_modules/openai/package.json")).version);
"""


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather.

    Args:
        city: Rome or Oslo.
    """
    return f"Sun in {city}"


def chat(url: str) -> None:
    """openai: chat completions, plain and streamed."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
    messages: Any = [{"role": "user", "content": ASK}]
    body: Any = {"model": "toy", "messages": messages, "tools": tools, "parallel_tool_calls": False}
    with client.chat.completions.stream(**body, tool_choice="required") as stream:
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sun"}]
    assert client.chat.completions.create(**body | {"max_tokens": 20, "tool_choice": "none"}).choices[0].message


def responses(url: str) -> None:
    """openai: responses, plain and streamed."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    history: Any = [{"role": "user", "content": ASK}]
    body: Any = {"model": "toy", "input": history, "tools": tools, "parallel_tool_calls": False}
    with client.responses.stream(**body, tool_choice="required") as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}]
    answer = client.responses.create(**body | {"tool_choice": "none"}, max_output_tokens=20)
    assert answer.status in ("completed", "incomplete")


def anthropic(url: str) -> None:
    """anthropic: a call of a tool, plain and streamed, its result, an answer; an unknown model."""
    import anthropic as library

    client = library.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    history: Any = [{"role": "user", "content": ASK}]
    body: Any = {"model": "toy", "messages": history, "max_tokens": 300}
    body["tools"] = [{"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}]
    forced: Any = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with client.messages.stream(**body, **forced) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use" and call.input["city"] in ("Rome", "Oslo") and message.stop_reason == "tool_use"
    (whole,) = client.messages.create(**body, **forced).content
    assert whole.type == "tool_use" and whole.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun"}
    history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**body | {"max_tokens": 20}, system="Be brief.", tool_choice={"type": "none"})
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens <= 20
    try:
        client.messages.create(model="none", max_tokens=1, messages=[{"role": "user", "content": ASK}])
        raise AssertionError("it is there")
    except library.NotFoundError:
        pass


def agents(url: str) -> None:
    """OpenAI Agents SDK: an agent's loop, over both endpoints."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    called = []

    def note(city: Literal["Rome", "Oslo"]) -> str:
        called.append(city)
        return weather(city)

    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="Weather",
            model=kind(model="toy", openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0)),
            tools=[function_tool(note)],
            model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=60),
            tool_use_behavior="stop_on_first_tool",
        )
        assert Runner.run_sync(agent, ASK, max_turns=3).final_output == weather(called[-1])


def langchain(url: str) -> None:
    """LangChain: a bound tool, and structured output."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool as as_tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="none", model="toy", max_retries=0, max_tokens=100)  # type: ignore[arg-type]
    bound = model.bind_tools([as_tool(weather)], tool_choice="weather", strict=True, parallel_tool_calls=False)
    asked = bound.invoke([HumanMessage(ASK)])
    (call,) = asked.tool_calls
    history = [HumanMessage(ASK), asked, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
    assert model.invoke(history, max_tokens=20) is not None
    whole = None
    for part in bound.stream([HumanMessage(ASK)]):
        whole = part if whole is None else whole + part
    assert whole is not None and whole.tool_calls[0]["name"] == "weather"
    schema = {"title": "place", "description": "A place.", **SCHEMA}
    assert model.with_structured_output(schema, method="json_schema").invoke(ASK)["city"] in ("Rome", "Oslo")


def pydantic_ai(url: str) -> None:
    """Pydantic AI: an output through a tool."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(BaseModel):
        city: Literal["Rome", "Oslo"]

    model = OpenAIChatModel("toy", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, output_type=Place, model_settings={"max_tokens": 200, "parallel_tool_calls": False})
    assert agent.run_sync(ASK).output.city in ("Rome", "Oslo")


def instructor(url: str) -> None:
    """Instructor: a model of Pydantic through a tool."""
    import instructor as library
    from openai import OpenAI
    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Rome", "Oslo"]

    client = library.from_openai(OpenAI(base_url=url, api_key="none"), mode=library.Mode.TOOLS)
    messages: Any = [{"role": "user", "content": ASK}]
    place = client.chat.completions.create(model="toy", response_model=Place, messages=messages, max_retries=1)
    assert place.city in ("Rome", "Oslo")


def litellm(url: str) -> None:
    """LiteLLM: a call, plain and streamed."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
    import litellm as library

    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    body: Any = {"model": "hosted_vllm/toy", "api_base": url, "api_key": "none", "tools": tools}
    body |= {"messages": [{"role": "user", "content": ASK}], "tool_choice": "required", "num_retries": 0}
    (call,) = library.completion(**body, parallel_tool_calls=False).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    chunks = list(library.completion(**body, parallel_tool_calls=False, stream=True))
    assert library.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function.name == "weather"


def llm(url: str) -> None:
    """llm: a prompt on its command line."""
    with tempfile.TemporaryDirectory() as folder:
        model = [{"model_id": "toy", "model_name": "toy", "api_base": url, "supports_schema": True}]
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(model))
        env = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "llm", "-m", "toy", ASK, "--schema", json.dumps(SCHEMA)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["city"] in ("Rome", "Oslo"), done.stdout


CLIENTS: dict[str, tuple[str, Callable[[str], None]]] = {
    "openai, chat": ("openai", chat),
    "openai, responses": ("openai", responses),
    "anthropic": ("anthropic", anthropic),
    "OpenAI Agents SDK": ("openai-agents", agents),
    "LangChain": ("langchain-openai", langchain),
    "Pydantic AI": ("pydantic-ai-slim", pydantic_ai),
    "Instructor": ("instructor", instructor),
    "LiteLLM": ("litellm", litellm),
    "llm": ("llm", llm),
}


def save_model(folder: Path) -> None:
    """A tiny random model of bytes, with the markers and the template of tools."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": len(letters), "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(wrapped), max_position_embeddings=8192, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)


def serve(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """A server that is ready."""
    command = [sys.executable, "-m", "outrider", "serve", "--target", str(folder), "--draft", "ngram", "-k", "4"]
    server = subprocess.Popen([*command, "--served-model-name", "toy", "--port", str(port)])
    for _ in range(600):
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return server
        if server.poll() is not None:
            break
        time.sleep(0.2)
    server.kill()
    raise SystemExit("the server has not started")


def own_python(pythons: list[str], package: str) -> str:
    """The environment that has a client."""
    for python in pythons:
        code = f"import importlib.metadata as m; m.version({package!r})"
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0:
            return python
    raise SystemExit(f"none of the environments has {package}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", help="of the clients' environments")
    parser.add_argument("--node", type=Path, help="folder with node_modules/openai")
    parser.add_argument("--client", nargs=2, metavar=("NAME", "URL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        from importlib.metadata import version

        package, run = CLIENTS[args.client[0]]
        run(args.client[1])
        print(version(package))
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        save_model(Path(folder))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        server, url = serve(Path(folder), port), f"http://127.0.0.1:{port}/v1"
        commands = {
            name: [own_python(args.python, package), __file__, "-", "--client", name, url]
            for name, (package, _) in CLIENTS.items()
        }
        if args.node:
            given = json.dumps({"url": url, "ask": ASK, "schema": SCHEMA})
            (args.node / "client.mjs").write_text(NODE)
            commands["openai for node"] = ["node", "client.mjs", given]
        has_failed = False
        try:
            for name, command in commands.items():
                cwd = args.node if name == "openai for node" else None
                env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=180, cwd=cwd, env=env
                )
                is_ok = done.returncode == 0
                has_failed |= not is_ok
                print(f"{name:20} {done.stdout.split()[-1] if is_ok else 'FAILED':12}", flush=True)
                if not is_ok:
                    print(done.stderr[-3000:], file=sys.stderr)
        finally:
            server.terminate()
            server.wait()
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
