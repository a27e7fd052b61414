# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""`transformers serve` and `transformers chat` on our folders, over HTTP: they say what `generate` says.

One server loads exported folders as remote code, in a process without loopergy. The other is `loopergy serve` on a
folder without code, with `transformers chat` talking to it.
"""

import copy
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopergy
from loopergy.hub_export import export

for _library in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(_library)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAMILIES = {
    "ouro": (loopergy.OuroForCausalLM, {}),
    "lt2": (loopergy.LT2ForCausalLM, {"layer_mixers": "gdn,full"}),
    "cem_llama": (loopergy.CEMLlamaForCausalLM, {"num_steps": 2}),
    "nrgpt": (loopergy.NRGPTForCausalLM, {"max_position_embeddings": 256}),
    "gpt": (loopergy.GPTBaselineForCausalLM, {"max_position_embeddings": 256}),
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
QUESTION = [{"role": "user", "content": "What does the import statement do?"}]
LENGTH = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory, topics_tokenizer):
    """Export a model of each family that says words only: a stream cut inside a character would end differently."""
    place = tmp_path_factory.mktemp("served")
    tokenizer = copy.deepcopy(topics_tokenizer)
    tokenizer.chat_template = CHATML
    words = re.compile(" ?[A-Za-z]+")
    unsaid = [token for token in range(len(tokenizer)) if not words.fullmatch(tokenizer.decode([token]))]
    for name, (kind, fields) in FAMILIES.items():
        torch.manual_seed(0)
        fields = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "eos_token_id": None, **fields}
        model = kind(kind.config_class.from_preset("tiny", **fields))
        model.generation_config.suppress_tokens = unsaid
        export(model, place / name, tokenizer)
    return place


def answer(folder, turns, length=LENGTH, **template):
    """Say what a model in this process answers greedily."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt", **template
    )
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=length)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@contextmanager
def serving(log, *command):
    """Run a server on a free port until the block ends; give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(log.parent / "home")}
    command = [sys.executable, "-m", *map(str, command), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(600):
                if process.poll() is not None:
                    raise AssertionError(log.read_text())
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=10).close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    """Serve whatever folder a request names, with the code that is in it."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, "transformers.cli.transformers", "serve", "--trust-remote-code") as address:
        yield address


def post(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return response.read().decode()


def chat(server, folder, turns=QUESTION, **options):
    """Ask for a chat completion without sampling."""
    settings = {"temperature": 0, "max_tokens": LENGTH, **options}
    return post(f"{server}/v1/chat/completions", model=str(folder), messages=turns, **settings)


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_of_asking_gives_the_greedy_answer(server, folders, name):
    expected = answer(folders / name, QUESTION)
    whole = json.loads(chat(server, folders / name))
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == LENGTH

    pieces = [piece["choices"][0] for piece in events(chat(server, folders / name, stream=True))]
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == expected
    assert len(pieces) > 3
    assert pieces[-1]["finish_reason"] == "length"

    url, asked = f"{server}/v1/responses", QUESTION[0]["content"]
    settings = {"model": str(folders / name), "input": asked, "temperature": 0, "max_output_tokens": LENGTH}
    response = json.loads(post(url, stream=False, **settings))
    assert response["output"][0]["content"][0]["text"] == expected
    stream = events(post(url, stream=True, **settings))
    assert "".join(event["delta"] for event in stream if event["type"] == "response.output_text.delta") == expected
    assert stream[-1]["type"] == "response.completed"


def test_the_second_turn_of_a_conversation_is_answered_like_a_text_of_its_own(server, folders):
    first = answer(folders / "lt2", QUESTION)
    turns = [*QUESTION, {"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    expected = answer(folders / "lt2", turns)
    for _ in range(2):
        assert json.loads(chat(server, folders / "lt2", turns))["choices"][0]["message"]["content"] == expected


def test_the_thinking_switch_and_stop_strings_reach_the_model(server, folders):
    folder = folders / "ouro"
    expected = answer(folder, QUESTION, enable_thinking=True)
    thinking = json.loads(chat(server, folder, chat_template_kwargs={"enable_thinking": True}))
    assert thinking["choices"][0]["message"]["content"] == expected
    plain = json.loads(chat(server, folder))
    assert thinking["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]

    text = plain["choices"][0]["message"]["content"]
    stopped = json.loads(chat(server, folder, stop=[text[2:4]]))["choices"][0]
    assert text.startswith(stopped["message"]["content"])
    assert len(stopped["message"]["content"]) < len(text)
    assert stopped["finish_reason"] == "stop"


def test_a_model_that_is_not_there_is_an_error_and_the_server_goes_on(server, folders):
    with pytest.raises(urllib.error.HTTPError) as error:
        chat(server, folders / "nobody")
    assert error.value.code >= 400
    assert json.loads(chat(server, folders / "gpt"))["choices"][0]["message"]["content"]


def test_loopergy_serves_a_folder_without_code_and_transformers_chat_talks_to_it(folders, tmp_path):
    bare = shutil.copytree(folders / "lt2", tmp_path / "bare", ignore=shutil.ignore_patterns("*.py"))
    with serving(tmp_path / "log", "loopergy.cli", "serve", bare) as address:
        expected = answer(folders / "lt2", QUESTION)
        assert json.loads(chat(address, bare))["choices"][0]["message"]["content"] == expected
        with pytest.raises(urllib.error.HTTPError) as error:
            chat(address, folders / "ouro")
        assert error.value.code == 400, "this server is for one model"

        unsaid = json.loads((bare / "generation_config.json").read_text())["suppress_tokens"]
        flags = ["do_sample=False", f"max_new_tokens={LENGTH}", f"suppress_tokens={json.dumps(unsaid)}"]
        command = ["-m", "transformers.cli.transformers", "chat", bare, f"{address}/v1", *flags]
        typed = f"{QUESTION[0]['content']}\nn\n!exit\n"  # no, it shall not go on
        talk = subprocess.run(
            [sys.executable, *map(str, command)],
            input=typed,
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "COLUMNS": "200"},
            timeout=300,
        )
    assert talk.returncode == 0, talk.stderr
    assert "".join(expected.split()) in "".join(talk.stdout.split())
