# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the recipes, read by `loopergy run` and by the demo. Folder `recipes/`, imported as `loopergy.recipes`."""
