# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Publish and fetch through the real Hub client, talking HTTP to a small Hub on this machine."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loopback_hub import TOKEN, LoopbackHub

import loopergy
from loopergy.hub_export import export

FETCH = """
import sys
import torch
from transformers import AutoModelForCausalLM

repo, file = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True).eval()
torch.save(model(torch.arange(3, 20)[None]).logits, file)
assert "loopergy" not in sys.modules
"""

# What somebody without loopergy does next with a model of ours: tune it, save it, publish it under another name.
PASS_ON = (
    FETCH
    + """
with torch.no_grad():
    model.lm_head.weight.mul_(2)
model.save_pretrained("tuned")
again = AutoModelForCausalLM.from_pretrained("tuned", trust_remote_code=True).eval()
torch.save(again(torch.arange(3, 20)[None]).logits, "tuned.pt")
again.push_to_hub("user/tuned")
"""
)

PUSH = """
import torch
import loopergy

torch.manual_seed(0)
model = loopergy.LT2ForCausalLM(loopergy.LT2Config.from_preset("tiny", layer_mixers="gdn,full"))
print(model.push_to_hub("user/mine", private=True, tags=["a-tag"]))
with torch.no_grad():
    model.lm_head.weight.add_(1)
print(model.push_to_hub("user/mine", revision="next", commit_message="second", tags=["too-late"]))
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


def client(hub, tmp_path, *command, token=TOKEN, offline=False):
    """Run a command as a user of this Hub with a fresh cache; the client reads its address when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": token,
    }
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)


def files_in(folder):
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def push(hub, tmp_path, folder, **options):
    return client(hub, tmp_path, "-m", "loopergy.cli", "push", folder, "user/tiny", **options)


def test_what_is_pushed_loads_by_its_name_in_a_process_without_loopergy(hub, folder, tmp_path):
    done = push(hub, tmp_path, folder)
    assert done.returncode == 0, done.stderr
    assert f"{hub.address}/user/tiny/commit/" in done.stdout
    assert len(hub.commits["user/tiny"]) == 2, "an empty repository and one commit"
    assert set(hub.commits["user/tiny"][-1]) == files_in(folder)

    script = tmp_path / "fetch.py"
    script.write_text(FETCH)
    done = client(hub, tmp_path, script, "user/tiny", tmp_path / "logits.pt")
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


def test_hidden_files_stay_at_home_but_for_those_of_the_hub(hub, folder, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "tiny")
    for name in (".env", ".git/config", "__pycache__/x.pyc", "pictures/.DS_Store", ".eval_results/a.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x: 1")
    done = push(hub, tmp_path, folder)
    assert done.returncode == 0, done.stderr
    hidden = {name for name in hub.commits["user/tiny"][-1] if "/." in f"/{name}" or "__pycache__" in name}
    assert hidden == {".eval_results/a.yaml"}


def test_a_hub_out_of_reach_is_one_line(folder, tmp_path):
    class Nowhere:
        address = "http://127.0.0.1:1"

    done = push(Nowhere, tmp_path, folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "\nloopergy: the Hub cannot be reached: " in f"\n{done.stderr}"


def test_a_wrong_token_publishes_nothing_and_says_so_in_one_line(hub, folder, tmp_path):
    done = push(hub, tmp_path, folder, token="hf_wrong")
    assert done.returncode == 2
    assert "\nloopergy: " in f"\n{done.stderr}"  # torchao may have spoken before
    assert "401" in done.stderr
    assert hub.commits == {}


def test_a_broken_upload_leaves_nothing_half_published(hub, folder, tmp_path):
    hub.fail_on = "objects/"
    done = push(hub, tmp_path, folder)
    assert done.returncode != 0
    assert hub.commits["user/tiny"] == [{}]


@pytest.mark.slow
def test_push_to_hub_publishes_the_code_with_the_model_and_what_is_published_can_be_passed_on(hub, folder, tmp_path):
    """Guards E8."""
    done = client(hub, tmp_path, "-c", PUSH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{hub.address}/user/mine/commit/") == 2
    empty, first, second = hub.commits["user/mine"]
    assert empty == {}
    assert set(first) == files_in(folder), "what `loopergy push` publishes, in one commit"
    assert "- a-tag" in first["README.md"].decode()
    assert second["README.md"] == first["README.md"], "a card that is there stays"
    assert "POST /api/models/user/mine/branch/next" in hub.requests
    assert "POST /api/models/user/mine/commit/next" in hub.requests

    hub.commits["user/mine"].pop()
    done = client(hub, tmp_path, "-c", PASS_ON, "user/mine", "logits.pt")
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    model = loopergy.LT2ForCausalLM(loopergy.LT2Config.from_preset("tiny", layer_mixers="gdn,full")).eval()
    with torch.no_grad():
        expected = model(torch.arange(3, 20)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), expected)
    tuned = torch.load(tmp_path / "tuned.pt", weights_only=True)
    torch.testing.assert_close(tuned, 2 * expected)
    published = hub.commits["user/tuned"][-1]
    assert set(published) == {name for name in first if not name.startswith("pictures/")}, "the card is another"
    assert all(published[name] == first[name] for name in first if name.endswith(".py"))


@pytest.mark.slow
def test_four_offline_processes_at_once_load_from_the_cache_of_the_hub(hub, folder, tmp_path):
    """Guards E8: the cache is full of symlinks, and all four copy the code to the same folder first."""
    push(hub, tmp_path, folder)
    online = client(hub, tmp_path, "-c", FETCH, "user/tiny", "0.pt")
    assert online.returncode == 0, online.stderr
    assert any(file.is_symlink() for file in (tmp_path / "cache").rglob("modeling_lt2.py"))
    shutil.rmtree(tmp_path / "cache" / "modules")
    before = len(hub.requests)
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(client, hub, tmp_path, "-c", FETCH, "user/tiny", f"{number}.pt", offline=True)
            for number in range(1, 5)
        ]
    for run in runs:
        assert run.result().returncode == 0, run.result().stderr
    logits = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(5)]
    assert all(torch.equal(values, logits[0]) for values in logits)
    assert len(hub.requests) == before, "offline means no request"
