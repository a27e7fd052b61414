# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Share what tests of the command line need."""

import sys

import pytest

from loopergy import cli


@pytest.fixture
def shown_by_main(monkeypatch, capsys):
    """Run `main` on a line that fails, and return what it writes."""

    def shown(*line):
        monkeypatch.setattr(sys, "argv", ["loopergy", *map(str, line)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        text = capsys.readouterr().err.splitlines()
        assert text[-1] == "(loopergy --debug VERB ... shows where it came from)"
        return text[-2]

    return shown
