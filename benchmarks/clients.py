"""Real clients against real servers: each chats with SmolLM2, and calls a tool of a tiny random model.

    python -m venv A && A/bin/pip install openai-agents anthropic langchain-openai langchain-anthropic llm \\
        'pydantic-ai-slim[openai]'
    python -m venv B && B/bin/pip install litellm 'lm-eval[api]'  # each of these wants other versions of openai
    python -m venv C && C/bin/pip install llama-index-llms-openai-like llama-index-embeddings-openai-like guidance
    python -m venv D && D/bin/pip install instructor
    python -m venv E && E/bin/pip install aider-chat
    python -m venv F && F/bin/pip install open-webui  # 2.4 GB with PyTorch for CPUs
    npm install --prefix NODE openai @continuedev/cli cline
    PYTHONPATH=src python benchmarks/clients.py {A,B,C,D,E,F}/bin/python --node NODE [--only NAME ...]

Grammars alone give the random model's output sense: a call of the tool, then an answer. To agents for code it says a
script, in which a file is read or written. Each client runs in a process of its own, since their environments are not
Outrider's. Clients that are not installed are left out. Prints a table; exits with 1 if a client failed.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ASK = "What is the weather in Rome?"
FRANCE: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
]
PARIS = "The capital of France is Paris."  # SmolLM2's greedy answer
PICTURE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
OLD, NEW = "The hen is red.", "The hen is blue."  # of the file that agents read or write
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% set last = messages[-1] %}{% if last.role == 'tool' and '" + OLD + "' in last.content %}<script read>"
    "{% elif 'script ' in last.content %}<script {{ last.content.split('script ')[1].split('.')[0] }}>"
    "{% else %}<assistant>{% endif %}"
)
NODE = """
import OpenAI from "openai";
const { url, ask, tool, schema } = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: url, apiKey: "none" });
const messages = [{ role: "user", content: ask }];
const body = { model: "toy", messages, tools: [tool], max_tokens: 300 };
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
"""


@dataclass(frozen=True)
class At:
    """Where a client finds what it needs.

    Attributes:
        toy: address of the random model.
        real: address of SmolLM2.
        node: folder with node_modules.
        note: a file with the text ``OLD``, in a folder of its own.
    """

    toy: str
    real: str
    node: str
    note: str


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather.

    Args:
        city: Rome or Oslo.
    """
    return f"Sun in {city}"


def place_type() -> Any:
    """A model of Pydantic, which most clients take for structured output."""
    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Rome", "Oslo"]

    return Place


def check_paris(*texts: object) -> None:
    assert texts and all(text == PARIS for text in texts), texts


def check_refused(call: Callable[[], object], *words: str) -> None:
    """The client's exception names what was refused."""
    try:
        call()
    except Exception as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("nothing was refused")


def shell(*command: str, cwd: str | Path | None = None, **env: str) -> str:
    """Output of a command."""
    given = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 400}
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, check=False, **given)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return str(done.stdout)


def chat(at: At) -> None:
    """chat, stream, tool; images and embeddings refused"""
    from openai import OpenAI

    real = OpenAI(base_url=at.real, api_key="none", max_retries=0)
    body: Any = {"model": "smollm2", "messages": FRANCE, "temperature": 0, "max_tokens": 20}
    with real.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0].message.content
    check_paris(streamed, real.chat.completions.create(**body).choices[0].message.content)
    shown = [{"role": "user", "content": [PICTURE]}]
    check_refused(lambda: real.chat.completions.create(**body | {"messages": shown}), "images", "messages")
    check_refused(lambda: real.embeddings.create(model="smollm2", input="a"), "embeddings are not served")

    toy = OpenAI(base_url=at.toy, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": ASK}]
    body = {"model": "toy", "messages": messages, "tools": [TOOL], "parallel_tool_calls": False}
    with toy.chat.completions.stream(**body, tool_choice="required") as stream:
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sun"}]
    assert toy.chat.completions.create(**body | {"max_tokens": 20, "tool_choice": "none"}).choices[0].message
    form = toy.chat.completions.parse(model="toy", messages=messages[:1], response_format=place_type())
    assert form.choices[0].message.parsed is not None


def responses(at: At) -> None:
    """chat, stream, tool"""
    from openai import OpenAI

    real = OpenAI(base_url=at.real, api_key="none", max_retries=0)
    body: Any = {"model": "smollm2", "input": FRANCE, "temperature": 0, "max_output_tokens": 20}
    with real.responses.stream(**body) as stream:
        check_paris(stream.get_final_response().output_text, real.responses.create(**body).output_text)

    toy = OpenAI(base_url=at.toy, api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    history: Any = [{"role": "user", "content": ASK}]
    body = {"model": "toy", "input": history, "tools": tools, "parallel_tool_calls": False}
    with toy.responses.stream(**body, tool_choice="required") as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}]
    answer = toy.responses.create(**body | {"tool_choice": "none"}, max_output_tokens=20)
    assert answer.status in ("completed", "incomplete")


def anthropic(at: At) -> None:
    """chat, stream, tool, tokens counted; images refused"""
    import anthropic as library

    real = library.Anthropic(base_url=at.real.removesuffix("/v1"), api_key="none", max_retries=0)
    asked: Any = {"model": "smollm2", "system": FRANCE[0]["content"], "messages": FRANCE[1:]}
    body: Any = asked | {"max_tokens": 20, "extra_body": {"temperature": 0}}
    with real.messages.stream(**body) as stream:
        message = stream.get_final_message()
    check_paris(message.content[0].text, real.messages.create(**body).content[0].text)
    assert real.messages.count_tokens(**asked).input_tokens == message.usage.input_tokens + (
        message.usage.cache_read_input_tokens or 0
    )
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    shown = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    check_refused(lambda: real.messages.create(**body | {"messages": shown}), "images", "messages")

    toy = library.Anthropic(base_url=at.toy.removesuffix("/v1"), api_key="none", max_retries=0)
    history: Any = [{"role": "user", "content": ASK}]
    body = {"model": "toy", "messages": history, "max_tokens": 300}
    body["tools"] = [{"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}]
    forced: Any = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with toy.messages.stream(**body, **forced) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use" and call.input["city"] in ("Rome", "Oslo") and message.stop_reason == "tool_use"
    (whole,) = toy.messages.create(**body, **forced).content
    assert whole.type == "tool_use" and whole.input["city"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun"}
    history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = toy.messages.create(**body | {"max_tokens": 20}, system="Be brief.", tool_choice={"type": "none"})
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens <= 20
    check_refused(lambda: toy.messages.create(**body | {"model": "none"}), "unknown model 'none'")


def agents(at: At) -> None:
    """an agent's loop, over both endpoints"""
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
            model=kind(model="toy", openai_client=AsyncOpenAI(base_url=at.toy, api_key="none", max_retries=0)),
            tools=[function_tool(note)],
            model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=60),
            tool_use_behavior="stop_on_first_tool",
        )
        assert Runner.run_sync(agent, ASK, max_turns=3).final_output == weather(called[-1])


def langchain(at: At) -> None:
    """chat, stream, tool, structured output; images and embeddings refused"""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool as as_tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    own: Any = {"api_key": "none", "max_retries": 0}
    real = ChatOpenAI(base_url=at.real, model="smollm2", temperature=0, max_tokens=20, **own)
    check_paris(real.invoke(FRANCE).content, "".join(str(part.content) for part in real.stream(FRANCE)))
    check_refused(lambda: real.invoke([HumanMessage([PICTURE])]), "images", "messages")
    vectors = OpenAIEmbeddings(base_url=at.real, model="smollm2", check_embedding_ctx_length=False, **own)
    check_refused(lambda: vectors.embed_query("a"), "embeddings are not served")

    model = ChatOpenAI(base_url=at.toy, model="toy", max_tokens=100, **own)
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


def langchain_anthropic(at: At) -> None:
    """chat, stream, tool, tokens counted"""
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, SystemMessage

    own: Any = {"api_key": "none", "max_retries": 0, "max_tokens": 100}
    real = ChatAnthropic(base_url=at.real.removesuffix("/v1"), model="smollm2", temperature=0, **own)
    check_paris(real.invoke(FRANCE).content, "".join(str(part.text) for part in real.stream(FRANCE)))
    messages = [SystemMessage(FRANCE[0]["content"]), HumanMessage(FRANCE[1]["content"])]
    assert real.get_num_tokens_from_messages(messages) > 10
    toy = ChatAnthropic(base_url=at.toy.removesuffix("/v1"), model="toy", **own)
    (call,) = toy.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(ASK).tool_calls
    assert call["args"]["city"] in ("Rome", "Oslo")


def llama_index(at: At) -> None:
    """chat, stream, tool, structured output; embeddings refused"""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    own: Any = {"api_key": "none", "max_retries": 0, "is_chat_model": True, "is_function_calling_model": True}
    real = OpenAILike(model="smollm2", api_base=at.real, temperature=0, max_tokens=20, **own)
    messages = [ChatMessage(**message) for message in FRANCE]
    *_, last = real.stream_chat(messages)
    check_paris(real.chat(messages).message.content, last.message.content)
    vectors = OpenAILikeEmbedding(model_name="smollm2", api_base=at.real, api_key="none", max_retries=0)
    check_refused(lambda: vectors.get_text_embedding("a"), "embeddings are not served")

    toy = OpenAILike(model="toy", api_base=at.toy, max_tokens=100, **own)
    tool = FunctionTool.from_defaults(weather)
    answer = toy.chat_with_tools([tool], ASK, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = toy.get_tool_calls_from_response(answer)
    assert call.tool_kwargs["city"] in ("Rome", "Oslo")
    assert toy.as_structured_llm(place_type()).complete(ASK).raw.city in ("Rome", "Oslo")


def pydantic_ai(at: At) -> None:
    """chat, stream, output through a tool and through a schema"""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("smollm2", provider=OpenAIProvider(base_url=at.real, api_key="none"))
    agent = Agent(model, system_prompt=FRANCE[0]["content"], model_settings={"max_tokens": 20, "temperature": 0})
    with agent.run_stream_sync(FRANCE[1]["content"]) as stream:
        *_, text = stream.stream_text()
    check_paris(agent.run_sync(FRANCE[1]["content"]).output, text)
    model = OpenAIChatModel("toy", provider=OpenAIProvider(base_url=at.toy, api_key="none"))
    for output in (place_type(), NativeOutput(place_type())):
        forced = Agent(model, output_type=output, model_settings={"max_tokens": 200, "parallel_tool_calls": False})
        assert forced.run_sync(ASK).output.city in ("Rome", "Oslo")


def instructor(at: At) -> None:
    """structured output through a tool, a schema and a stream"""
    import instructor as library
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": ASK}]
    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(OpenAI(base_url=at.toy, api_key="none"), mode=mode)
        body: Any = {"model": "toy", "response_model": place_type(), "messages": messages, "max_retries": 1}
        assert client.chat.completions.create(**body).city in ("Rome", "Oslo")
        *_, last = client.chat.completions.create_partial(**body)
        assert last.city in ("Rome", "Oslo")


def guidance(at: At) -> None:
    """chat, a choice, a regular expression, JSON; attributes of a gen refused"""
    from guidance import assistant, gen, select, system, user
    from guidance import json as form
    from guidance.models.experimental import VLLMModel

    def asked(url: str, name: str, messages: Any, part: Any) -> Any:
        model = VLLMModel(name, base_url=url, api_key="none", echo=False)
        for message in messages:
            with (system if message["role"] == "system" else user)():
                model += message["content"]
        with assistant():
            return (model + part)["said"]

    assert asked(at.real, "smollm2", FRANCE, gen("said", regex="It is [A-Z][a-z]{2,9}")).startswith("It is ")
    for attribute in ({"max_tokens": 20}, {"temperature": 0.0}):
        wrong = gen("said", **attribute)
        check_refused(lambda wrong=wrong: asked(at.real, "smollm2", FRANCE, wrong), *attribute)
    question = [{"role": "user", "content": ASK}]
    for part in (select(["Rome", "Oslo"], name="said"), gen("said", regex="Rome|Oslo")):
        assert asked(at.toy, "toy", question, part) in ("Rome", "Oslo")
    assert json.loads(asked(at.toy, "toy", question, form("said", schema=SCHEMA)))["city"] in ("Rome", "Oslo")


def litellm(at: At) -> None:
    """chat, stream, tool; images and embeddings refused"""
    import litellm as library

    body: Any = {"model": "hosted_vllm/smollm2", "api_base": at.real, "api_key": "none", "num_retries": 0}
    talk = body | {"messages": FRANCE, "temperature": 0, "max_tokens": 20}
    chunks = list(library.completion(**talk, stream=True))
    streamed = library.stream_chunk_builder(chunks).choices[0].message.content
    check_paris(library.completion(**talk).choices[0].message.content, streamed)
    shown = [{"role": "user", "content": [PICTURE]}]
    check_refused(lambda: library.completion(**talk | {"messages": shown}), "images")
    check_refused(lambda: library.embedding(**body, input=["a"]), "embeddings are not served")

    body |= {"model": "hosted_vllm/toy", "api_base": at.toy, "tools": [TOOL], "tool_choice": "required"}
    body["messages"] = [{"role": "user", "content": ASK}]
    (call,) = library.completion(**body, parallel_tool_calls=False).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    chunks = list(library.completion(**body, parallel_tool_calls=False, stream=True))
    assert library.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function.name == "weather"


def llm(at: At) -> None:
    """chat, stream and a schema on its command line"""
    with tempfile.TemporaryDirectory() as folder:
        models = [
            {"model_id": name, "model_name": name, "api_base": url, "supports_schema": True}
            for name, url in (("toy", at.toy), ("smollm2", at.real))
        ]
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(models))
        start, env = (sys.executable, "-m", "llm"), {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        talk = (*start, "-m", "smollm2", "-s", FRANCE[0]["content"], FRANCE[1]["content"], "-o", "temperature", "0")
        check_paris(shell(*talk, **env).strip(), shell(*talk, "--no-stream", **env).strip())
        said = shell(*start, "-m", "toy", ASK, "--schema", json.dumps(SCHEMA), **env)
        assert json.loads(said)["city"] in ("Rome", "Oslo"), said


def lm_eval(at: At) -> None:
    """scores of choices, texts; chats"""
    import lm_eval as library
    from lm_eval.tasks import TaskManager

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    from harness_tasks import TASKS, write_tasks

    with tempfile.TemporaryDirectory() as folder:
        tasks = TaskManager(include_path=str(write_tasks(Path(folder))), include_defaults=False)
        for kind, path, names in (
            ("local-completions", "", list(TASKS)),
            ("local-chat-completions", "chat/", ["answers"]),
        ):
            sizes = {"max_length": 512, "tokenizer_backend": None if path else "remote"}
            found = library.simple_evaluate(
                kind,
                model_args={"base_url": f"{at.real}/{path}completions", "model": "smollm2", "max_retries": 1} | sizes,
                apply_chat_template=bool(path),
                tasks=names,
                task_manager=tasks,
                bootstrap_iters=0,
            )
            for name in names:
                assert len(found["samples"][name]) == len(TASKS[name][0])


def aider(at: At) -> None:
    """writes a file (script)"""
    file = Path(at.note).parent / "aider.txt"
    file.write_text(OLD)
    options = "--yes-always --no-git --no-check-update --no-show-model-warnings --no-analytics --edit-format whole"
    command = [sys.executable, "-m", "aider", *options.split(), "--model", "openai/toy", "--openai-api-key", "none"]
    command += ["--openai-api-base", at.toy, "--message", "Say script aider.", file.name]
    said = shell(*command, cwd=file.parent, HOME=str(file.parent), LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert file.read_text().strip() == NEW, said


def continue_cli(at: At) -> None:
    """reads a file by a call, and answers (script)"""
    folder = Path(at.note).parent
    model = {"name": "toy", "provider": "openai", "model": "toy", "apiBase": at.toy, "apiKey": "none"}
    (folder / "config.yaml").write_text(
        json.dumps({"name": "Local", "version": "1.0.0", "schema": "v1", "models": [model | {"roles": ["chat"]}]})
    )
    command = [f"{at.node}/node_modules/.bin/cn", "--config", str(folder / "config.yaml"), "--auto", "-p"]
    env = {"HOME": str(folder), "CONTINUE_TELEMETRY_ENABLED": "0"}
    assert "It is red." in shell(*command, "Say script continue.", cwd=folder, **env)


def cline(at: At) -> None:
    """reads a file by a call, and answers (script)"""
    folder = Path(at.note).parent
    command, data = f"{at.node}/node_modules/.bin/cline", ["--data-dir", str(folder / "cline")]
    shell(command, "auth", "-p", "openai", "-k", "none", "-m", "toy", "-b", at.toy, *data, cwd=folder, HOME=str(folder))
    options = [*data, "-P", "openai", "-m", "toy", "--json", "--retries", "1", "-t", "300"]
    assert "It is red." in shell(command, *options, "Say script cline.", cwd=folder, HOME=str(folder))


def open_webui(at: At) -> None:
    """its backend lists the models and chats, whole and streamed"""
    with tempfile.TemporaryDirectory() as folder:
        off = {"ENABLE_OLLAMA_API": "False", "WEBUI_AUTH": "False", "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1"}
        own = {"DATA_DIR": folder, "WEBUI_SECRET_KEY": "none", "RAG_EMBEDDING_ENGINE": "openai"}
        env = os.environ | off | own | {"OPENAI_API_BASE_URL": at.real, "OPENAI_API_KEY": "none"}
        port, program = free_port(), str(Path(sys.executable).parent / "open-webui")
        url = f"http://127.0.0.1:{port}"
        with started([program, "serve", "--host", "127.0.0.1", "--port", str(port)], f"{url}/health", env, folder):
            signed = post(f"{url}/api/v1/auths/signin", {"email": "", "password": ""})
            key = {"Authorization": f"Bearer {json.loads(signed)['token']}"}
            with urllib.request.urlopen(urllib.request.Request(f"{url}/api/models", headers=key)) as answer:
                assert "smollm2" in [model["id"] for model in json.load(answer)["data"]]
            body = {"model": "smollm2", "messages": FRANCE, "temperature": 0, "max_tokens": 20}
            whole = json.loads(post(f"{url}/api/chat/completions", body, key))
            lines = post(f"{url}/api/chat/completions", body | {"stream": True}, key).split("\n\n")
            parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            texts = [one["delta"].get("content") or "" for part in parts for one in part.get("choices", [])]
            check_paris(whole["choices"][0]["message"]["content"], "".join(texts))


def node(at: At) -> None:
    """stream, tool, responses"""
    script = Path(at.node) / "client.mjs"
    script.write_text(NODE)
    given = json.dumps({"url": at.toy, "ask": ASK, "tool": TOOL, "schema": SCHEMA})
    shell("node", script.name, given, cwd=at.node)


CLIENTS: dict[str, tuple[str, Callable[[At], None]]] = {  # with their packages
    "openai, chat": ("openai", chat),
    "openai, responses": ("openai", responses),
    "openai for Node": ("npm:openai", node),
    "anthropic": ("anthropic", anthropic),
    "OpenAI Agents SDK": ("openai-agents", agents),
    "LangChain, OpenAI": ("langchain-openai", langchain),
    "LangChain, Anthropic": ("langchain-anthropic", langchain_anthropic),
    "LlamaIndex": ("llama-index-llms-openai-like", llama_index),
    "Pydantic AI": ("pydantic-ai-slim", pydantic_ai),
    "Instructor": ("instructor", instructor),
    "guidance": ("guidance", guidance),
    "LiteLLM": ("litellm", litellm),
    "llm": ("llm", llm),
    "lm-evaluation-harness": ("lm-eval", lm_eval),
    "aider": ("aider-chat", aider),
    "Continue": ("npm:@continuedev/cli", continue_cli),
    "Cline": ("npm:cline", cline),
    "Open WebUI": ("open-webui", open_webui),
}


def save_model(folder: Path, scripts: dict[str, str]) -> None:
    """A tiny random model of bytes, with the markers and the template of tools. It says little white space, which
    grammars allow without end, and ends soon. After ``<script NAME>`` it says a script, a token of its own."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [text for name, script in scripts.items() for text in (f"<script {name}>", script)]
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": len(letters), "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(wrapped), max_position_embeddings=131072, **sizes, **ends)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        always = len(texts)  # a dimension that all tokens share
        for weight in (embedding, head):
            weight[:, : always + 1] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[: always + 1] = 0
            layer.mlp.down_proj.weight[: always + 1] = 0
        embedding[:, always] = 1
        head[wrapped.convert_tokens_to_ids(["\u0120", "\u010a", "\u0109", "\u010d"]), always] = -2  # white space
        head[len(letters), always] = 0.5
        for place, text in enumerate(texts):  # each has a dimension of its own, which leads to the next token
            token = wrapped.convert_tokens_to_ids(text)
            embedding[token, place] = 100
            head[len(letters) if place % 2 else token + 1, place] = 10
    model.save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def post(url: str, body: Any, headers: Any = None) -> str:
    sent = {"Content-Type": "application/json", **(headers or {})}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), sent)) as answer:
        return str(answer.read().decode())


@contextmanager
def started(command: list[str], health: str, env: Any = None, cwd: str | None = None) -> Iterator[None]:
    """A server that is ready."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env=env, cwd=cwd, stdout=log, stderr=log)
        try:
            for _ in range(3000):
                with suppress(OSError):
                    urllib.request.urlopen(health).close()
                    break
                if server.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read()[-3000:].decode())
                time.sleep(0.2)
            else:
                raise SystemExit(f"{command[0]} has not started")
            yield
        finally:
            server.terminate()
            server.wait()


@contextmanager
def served(target: str, name: str, *options: str) -> Iterator[str]:
    """Outrider's server; its address."""
    port = free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--target", target, "--port", str(port), *options]
    with started([*command, "--served-model-name", name], f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}/v1"


def find(package: str, pythons: list[str], node: Path | None) -> tuple[str, str] | None:
    """The environment that has a client, and the client's version."""
    if package.startswith("npm:"):
        file = (node or Path("node")) / "node_modules" / package.removeprefix("npm:") / "package.json"
        return (sys.executable, json.loads(file.read_text())["version"]) if file.exists() else None
    for python in pythons:
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return python, done.stdout.strip()
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", help="of the clients' environments")
    parser.add_argument("--node", type=Path, help="folder with node_modules")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, metavar="NAME", help="of clients")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        CLIENTS[args.client[0]][1](At(**json.loads(args.client[1])))
        return
    from real_models import real_file

    from outrider.system.provenance import provenance

    results = []
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "work" / "note.txt"
        note.parent.mkdir()
        note.write_text(OLD)
        path = json.dumps(str(note))
        scripts = {
            "aider": f"aider.txt\n```\n{NEW}\n```\n",
            "continue": CALL % ("Read", f'{{"filepath": {path}}}'),
            "cline": CALL % ("read_files", f'{{"files": [{{"path": {path}}}]}}'),
            "read": "It is red.",
        }
        save_model(Path(folder), scripts)
        toy = served(folder, "toy", "--draft", "ngram", "-k", "4", "--slots", "2", "--context", "131072")
        with toy as toy_url, served(str(real_file("smollm2")), "smollm2", "--slots", "2") as real_url:
            at = At(toy_url, real_url, str((args.node or Path()).absolute()), str(note))
            for name, (package, run) in CLIENTS.items():
                found = None if name not in (args.only or CLIENTS) else find(package, args.python, args.node)
                if found is None:
                    continue
                command = [found[0], __file__, "-", "--client", name, json.dumps(asdict(at))]
                env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it is fetched
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200, env=env)
                results.append(
                    {"client": name, "version": found[1], "tried": run.__doc__, "is_ok": not done.returncode}
                )
                print(f"{name:22} {found[1]:9} {'FAILED' if done.returncode else 'ok':7} {run.__doc__}", flush=True)
                if done.returncode:
                    print(done.stderr[-3000:], file=sys.stderr)
    print(json.dumps({"provenance": provenance("cpu"), "clients": results}))
    sys.exit(not all(one["is_ok"] for one in results))


if __name__ == "__main__":
    main()
