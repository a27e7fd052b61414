# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""How a script of a test begins that runs where loopergy is not installed."""

WITHOUT_LOOPERGY = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "loopergy":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
"""
