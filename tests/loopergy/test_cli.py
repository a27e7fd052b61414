# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The command line: every verb shows an example that it understands, and errors are one line."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from loopergy import NRGPTConfig, NRGPTForCausalLM, OuroConfig, OuroForCausalLM, cli
from loopergy.conversion.families import MIXER_OPTIONS
from loopergy.tasks.catalog import make_task

ROOT = Path(__file__).resolve().parents[2]
GROUP = typer.main.get_command(cli.app)


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tiny_ouro(tmp_path_factory, topics_tokenizer):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    OuroForCausalLM(OuroConfig.from_preset("tiny", vocab_size=len(topics_tokenizer))).save_pretrained(folder)
    topics_tokenizer.save_pretrained(folder)
    return folder


def test_all_verbs_of_this_version_are_there():
    verbs = {"convert", "align", "select", "distill", "extend", "run", "generate", "demo", "info"}
    verbs |= {"trace", "eval", "card", "export", "push", "task", "serve", "recipes", "pretrain"}
    assert set(GROUP.commands) == verbs


@pytest.mark.parametrize("verb", sorted(GROUP.commands))
def test_help_shows_an_example_that_the_verb_understands(verb):
    shown = run(verb, "--help").output
    line = re.search(r"\[bold\](.+)\[/bold\]", GROUP.commands[verb].epilog).group(1)
    assert line.split()[:2] == ["loopergy", verb]
    assert "Example:" in shown
    words = shlex.split(line)
    GROUP.commands[verb].make_context(verb, words[2:])
    assert all((ROOT / word).is_file() for word in words if word.startswith("recipes/"))


def test_convert_writes_a_folder_that_generate_and_info_read(tiny_ouro, tmp_path):
    output = tmp_path / "hybrid"
    done = run("convert", tiny_ouro, "--keep-layers", "1,", "-o", output, "--set", "gdn_use_short_conv=true")
    assert done.exit_code == 0, done.output
    config = json.loads((output / "config.json").read_text())
    assert config["layer_mixers"][1] == "full"
    assert config["gdn_use_short_conv"] is True
    assert (output / "conversion_report.json").is_file()
    answer = run("generate", output, "hello", "-n", 3, "--num-loops", 1)
    assert answer.exit_code == 0, answer.output
    assert "3 tokens in" in answer.output or "tokens in" in answer.output
    described = run("info", output).output
    assert "gdn" in described
    assert "whatever the length" in described


def test_convert_takes_a_pattern_of_mixers_and_lists_them_all_in_its_help(tiny_ouro, tmp_path):
    output = tmp_path / "mixed"
    done = run("convert", tiny_ouro, "-k", "none", "--mixer", "kda,dsa", "-o", output, "--set", "dsa_topk=16")
    assert done.exit_code == 0, done.output
    config = json.loads((output / "config.json").read_text())
    assert config["layer_mixers"] == ["kda", "dsa"]
    assert config["dsa_topk"] == 16
    assert set(MIXER_OPTIONS) <= set(re.findall(r"[a-z0-9]+", cli.MIXER_HELP))


def test_generate_gives_the_tokens_of_the_python_call(tiny_ouro, topics_tokenizer):
    model = OuroForCausalLM.from_pretrained(tiny_ouro).eval()
    inputs = topics_tokenizer("The import statement", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False, num_loops=1)
    text = topics_tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    done = run("generate", tiny_ouro, "The import statement", "--raw", "-n", 4, "--num-loops", 1)
    assert text.strip() in done.output


def test_generate_switches_thinking_on(topics_tokenizer, tmp_path):
    config = OuroConfig.from_preset("tiny", vocab_size=len(topics_tokenizer), initializer_range=0.2)
    model = OuroForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    topics_tokenizer.save_pretrained(tmp_path)
    with open(tmp_path / "chat_template.jinja", "a") as template:
        template.write("{% if enable_thinking %}<think>{% endif %}")
    ids = topics_tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], add_generation_prompt=True)
    ids = ids["input_ids"] + topics_tokenizer("<think>").input_ids
    expected = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, len(ids) :]
    text = topics_tokenizer.decode(expected, skip_special_tokens=True).strip()
    assert text in run("generate", tmp_path, "Why?", "-n", 4, "--thinking").output
    assert text not in run("generate", tmp_path, "Why?", "-n", 4).output


RECIPE = """
teacher: {teacher}
data: offline:prose
dtype: float32
align: {{target_tokens: 128, length: 32, per_device_train_batch_size: 2, use_cpu: true, learning_rate: 1e-3}}
select: {{keep: 1, num_tokens: 64, length: 32}}
distill: {{target_tokens: 64, length: 32, per_device_train_batch_size: 2, use_cpu: true}}
evaluate: {{num_tokens: 64, length: 32}}
"""


def test_stages_run_one_by_one_and_a_recipe_runs_what_is_left(tiny_ouro, tmp_path):
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(teacher=tiny_ouro))
    early = run("distill", "-r", recipe, "-o", folder)
    assert isinstance(early.exception, ValueError)
    assert "'convert' is not done" in str(early.exception)
    aligned = run("align", "-r", recipe, "-o", folder, "--set", "target_tokens=64")
    assert aligned.exit_code == 0, aligned.output
    assert (folder / "align" / "stage.json").is_file()
    assert not (folder / "select").exists()
    skipped = run("distill", "-r", recipe, "-o", folder)
    assert "'select' is not done" in str(skipped.exception)
    flags = ["--teacher", tiny_ouro, "--data", "offline:prose", "--set", "target_tokens=64"]
    assert "`select: null` to keep no layer" in str(run("distill", *flags, "-o", folder).exception)
    chosen = run("select", "-r", recipe, "-o", folder)
    assert "kept layers [" in chosen.output
    rest = run("run", recipe, "-o", folder, "--set", "align.target_tokens=64")
    assert rest.exit_code == 0, rest.output
    assert "distill" in rest.output
    assert (folder / "report.html").is_file()


def test_a_recipe_may_leave_the_selection_out(tiny_ouro, tmp_path):
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    chosen = "select: {keep: 1, num_tokens: 64, length: 32}"
    recipe.write_text(RECIPE.format(teacher=tiny_ouro).replace(chosen, "select: null"))
    assert run("align", "-r", recipe, "-o", folder).exit_code == 0
    done = run("distill", "-r", recipe, "-o", folder)
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "distill" / "stage.json").read_text())["kept_layers"] == []


def test_another_setting_of_a_finished_stage_is_refused(tiny_ouro, tmp_path):
    flags = ["--teacher", tiny_ouro, "--data", "offline:prose", "-o", tmp_path]
    pairs = ["target_tokens=32", "length=32", "per_device_train_batch_size=1", "use_cpu=true"]
    options = [word for pair in pairs for word in ("--set", pair)]
    assert run("align", *flags, *options).exit_code == 0
    changed = run("align", *flags, *options, "--set", "learning_rate=1e-2")
    assert "other settings" in str(changed.exception)


@pytest.mark.parametrize(("stage", "field"), [("align", "target = "), ("select", "strategy = ")])
def test_the_fields_of_a_stage_are_listed(stage, field):
    listed = run(stage, "--fields").output
    assert field in listed
    assert "MISSING" not in listed
    assert ("TrainingArguments" in listed) == (stage != "select")


def test_a_stage_without_a_teacher_is_refused(tmp_path):
    assert "no teacher" in str(run("align", "-o", tmp_path).exception)


@pytest.mark.parametrize(
    ("text", "value"),
    [("6", 6), ("0.25", 0.25), ("3,7", "3,7"), ("3,", "3,"), ("all", "all"), ("none", []), (" 2 ", 2)],
)
def test_kept_layers_are_read_as_written(text, value):
    assert cli.parse_layers(text) == value


def test_settings_are_read_as_yaml():
    pairs = ["learning_rate=1e-4", "layers=[1, 2]", "name=gdn", "flag=true", "nothing=null", "too=None", "text=a=b"]
    assert cli.settings(pairs) == {
        "learning_rate": 1e-4,
        "layers": [1, 2],
        "name": "gdn",
        "flag": True,
        "nothing": None,
        "too": None,
        "text": "a=b",
    }
    assert cli.settings(["eval_strategy=no", "distill.save_strategy=no", "use_cpu=no"]) == {
        "eval_strategy": "no",
        "distill.save_strategy": "no",
        "use_cpu": False,
    }


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(ValueError, match="KEY=VALUE"):
        cli.settings(["learning_rate"])


def test_an_error_of_the_library_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    line = ["loopergy", "convert", str(tmp_path / "nothing-here"), "-k", "all", "-o", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("loopergy: ")
    assert "Traceback" not in shown
    monkeypatch.setattr(sys, "argv", [line[0], "--debug", *line[1:]])
    with pytest.raises((ValueError, OSError)):
        cli.main()


def test_a_folder_that_is_not_there_is_called_that(shown_by_main, tmp_path):
    shown = shown_by_main("trace", tmp_path / "nothing", "text")
    assert shown == f"loopergy: There is no folder or file '{tmp_path / 'nothing'}' to load a model from."


def test_errors_of_other_libraries_that_input_causes_are_one_line_too(shown_by_main, tiny_ouro, tmp_path):
    (tmp_path / "recipe.yaml").write_text("teacher: [unclosed\n")
    assert shown_by_main("run", tmp_path / "recipe.yaml", "-o", tmp_path / "run").startswith("loopergy: no YAML: ")
    shutil.copytree(tiny_ouro, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    wanted = "loopergy: a .safetensors file is damaged or cut short: "
    assert shown_by_main("generate", tmp_path / "cut", "hello").startswith(wanted)
    config = json.loads((tiny_ouro / "config.json").read_text())
    (tmp_path / "cut" / "config.json").write_text(json.dumps({**config, "total_ut_steps": "two"}))
    assert re.match("loopergy: the model's config: .*total_ut_steps.*two", shown_by_main("info", tmp_path / "cut"))


def test_a_full_disk_is_not_called_a_damaged_file_and_the_hub_out_of_reach_is_one_line():
    from huggingface_hub.errors import HTTPError
    from safetensors import SafetensorError

    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert cli.message_of(full).startswith("a .safetensors file cannot be written: Error while serializing: I/O")
    assert cli.message_of(HTTPError("no\nroute")) == "the Hub cannot be reached: no route"
    assert cli.message_of(OSError("two\nlines")) == "two lines"


def test_a_place_for_the_result_is_looked_at_before_the_work(shown_by_main, tiny_ouro, tmp_path):
    (tmp_path / "file").write_text("")
    for option, target, text in (
        ("--json", tmp_path, "is a folder"),
        ("--json", tmp_path / "file" / "e.json", "is a file; give a name in a folder"),
        ("--plot", tmp_path / "e.oops", "e.oops: the ending must be one of"),
        ("--plot", tmp_path / "e", "e: the ending must be one of"),
    ):
        assert text in shown_by_main("trace", tmp_path / "no-model", "text", option, target)
    assert "is a folder" in shown_by_main("eval", tiny_ouro, "--tasks", "no-task", "-o", tmp_path)


def test_a_trace_makes_the_folders_above_what_it_writes(tmp_path, topics_tokenizer):
    config = NRGPTConfig.from_preset("tiny", vocab_size=len(topics_tokenizer))
    NRGPTForCausalLM(config).save_pretrained(tmp_path / "model")
    topics_tokenizer.save_pretrained(tmp_path / "model")
    files = [tmp_path / "a" / "e.json", tmp_path / "b" / "e.svg"]
    done = run("trace", tmp_path / "model", "hello", "--json", files[0], "--plot", files[1])
    assert done.exit_code == 0, done.output
    assert all(file.stat().st_size for file in files)
    assert [file.name for file in files[0].parent.iterdir()] == ["e.json"]


@pytest.mark.parametrize("verb", sorted(GROUP.commands))
def test_every_path_of_a_verb_has_its_home_folder_expanded(verb, monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    commands = getattr(GROUP.commands[verb], "commands", {verb: GROUP.commands[verb]})
    for command in commands.values():
        for option in command.params:
            if option.type_descriptor.annotation is Path or option.name == "model":
                assert str(option.callback(None, option, "~/x")) == "/me/x", (verb, option.name)


def test_a_defect_keeps_its_traceback(monkeypatch):
    def broken():
        raise KeyError("x")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(KeyError):
        cli.main()


def test_generate_refuses_an_empty_prompt_and_loops_that_a_model_does_not_have(shown_by_main, tiny_ouro, tmp_path):
    assert "The text '' has no token" in shown_by_main("generate", tiny_ouro, "", "--raw")
    NRGPTForCausalLM(NRGPTConfig.from_preset("tiny")).save_pretrained(tmp_path)
    line = shown_by_main("generate", tmp_path, "hello", "--num-loops", 2)
    assert line.startswith("loopergy: num_loops=2 (--num-loops): a model of type 'nrgpt' has no such setting")


def test_a_word_outside_a_tasks_vocabulary_is_named(shown_by_main, tmp_path):
    task = make_task("permutations", length=5)
    NRGPTForCausalLM(NRGPTConfig.from_preset("tiny", vocab_size=len(task.tokenizer))).save_pretrained(tmp_path)
    task.tokenizer.save_pretrained(tmp_path)
    for verb in ("trace", "generate"):
        assert "The text holds 'hello', which the tokenizer" in shown_by_main(verb, tmp_path, "hello")


def test_version_is_shown():
    import loopergy

    assert run("--version").output.strip() == f"loopergy {loopergy.__version__}"
