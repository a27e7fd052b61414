# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Files that are no tasks are refused with their line; names that lm-eval does not know are, too."""

import importlib.util

import pytest

from loopergy.evaluation_tasks import load_tasks, task_of_file

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{half"], "line 1: no JSON"),
        ([""], "has no rows"),
        (['{"question": 1}'], r"line 1: a row has the fields"),
        (['{"text": "a"}', '{"context": "a", "continuation": "b"}'], "line 2"),
        (['{"context": "a", "choices": ["b", "c"], "answer": 2}'], "from 0 to 1; got 2"),
        (['{"context": "a", "choices": ["b", "c"], "answer": "0"}'], "line 1: `answer` .* from 0 to 1; got '0'"),
        (['{"context": "a", "choices": ["b", "c"], "answer": true}'], "from 0 to 1; got True"),
        (['{"context": "a", "choices": "bc", "answer": 0}'], "line 1: `choices` must be a list .* got 'bc'"),
        (['{"context": "a", "choices": ["b"], "answer": 0}'], r"at least two texts, got \['b'\]"),
        (['{"context": "a", "choices": ["b", 5], "answer": 0}'], "at least two texts"),
        (['{"text": "a"}', "", '{"text": ""}'], "line 3: `text` is empty"),
        (['{"text": 5}'], "line 1: `text` must be a text, got 5"),
        (['{"context": "a", "continuation": null}'], "`continuation` must be a text, got None"),
    ],
)
def test_a_file_that_is_no_task_is_refused_with_its_line(tmp_path, rows, message):
    file = tmp_path / "task.jsonl"
    file.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=message):
        task_of_file(file)


@pytest.mark.slow
@needs_lm_eval
def test_mmlu_is_known_by_name_and_offline_its_data_are_what_is_missing():
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    assert "mmlu" in manager.all_groups
    assert len([name for name in manager.all_subtasks if name.startswith("mmlu_")]) > 57
    with pytest.raises(OSError, match="the data of task 'mmlu_anatomy' cannot be had"):
        load_tasks(["mmlu_anatomy"])
