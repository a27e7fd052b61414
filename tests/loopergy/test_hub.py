# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Publish and fetch through the real Hub client, talking HTTP to a small Hub on this machine."""

import os
import subprocess
import sys

import pytest
import torch

import loopergy
from loopergy.hub_export import export

sys.path.insert(0, os.path.dirname(__file__))
from loopback_hub import TOKEN, LoopbackHub

FETCH = """
import sys
import torch
from transformers import AutoModelForCausalLM

assert "loopergy" not in sys.modules
model = AutoModelForCausalLM.from_pretrained("user/tiny", trust_remote_code=True).eval()
torch.save(model(torch.arange(3, 20)[None]).logits, sys.argv[1])
"""


@pytest.fixture
def hub():
    with LoopbackHub() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = loopergy.LT2ForCausalLM(loopergy.LT2Config.from_preset("tiny", layer_mixers="gdn,full"))
    return export(model, tmp_path_factory.mktemp("export") / "tiny")


def client(hub, tmp_path, *command, token=TOKEN):
    """Run a command as a user of this Hub with a fresh cache; the client reads its address when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": token,
    }
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)


def push(hub, tmp_path, folder, **options):
    return client(hub, tmp_path, "-m", "loopergy.cli", "push", folder, "user/tiny", **options)


def test_what_is_pushed_loads_by_its_name_in_a_process_without_loopergy(hub, folder, tmp_path):
    done = push(hub, tmp_path, folder)
    assert done.returncode == 0, done.stderr
    assert f"{hub.address}/user/tiny/commit/" in done.stdout
    assert len(hub.commits["user/tiny"]) == 2, "an empty repository and one commit"
    assert set(hub.commits["user/tiny"][-1]) == set(os.listdir(folder))

    script = tmp_path / "fetch.py"
    script.write_text(FETCH)
    done = client(hub, tmp_path, script, tmp_path / "logits.pt")
    assert done.returncode == 0, done.stderr
    model = loopergy.LT2ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model.eval()(torch.arange(3, 20)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), expected)


def test_a_second_push_sends_only_what_changed(hub, folder, tmp_path):
    push(hub, tmp_path, folder)
    (folder / "README.md").write_text("changed\n")
    before = len(hub.requests)
    done = push(hub, tmp_path, folder)
    assert done.returncode == 0, done.stderr
    assert hub.commits["user/tiny"][-1]["README.md"] == b"changed\n"
    assert not [request for request in hub.requests[before:] if request.startswith("PUT")], "weights went again"


def test_a_wrong_token_publishes_nothing_and_says_so_in_one_line(hub, folder, tmp_path):
    done = push(hub, tmp_path, folder, token="hf_wrong")
    assert done.returncode == 2
    assert done.stderr.startswith("loopergy: ")
    assert "401" in done.stderr
    assert hub.commits == {}


def test_a_broken_upload_leaves_nothing_half_published(hub, folder, tmp_path):
    hub.fail_on = "objects/"
    done = push(hub, tmp_path, folder)
    assert done.returncode != 0
    assert hub.commits["user/tiny"] == [{}]
