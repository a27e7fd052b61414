# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Looped language models as ordinary transformers models."""
