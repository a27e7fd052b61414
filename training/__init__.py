# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What all training stands on: text, settings, processes, checkpoints. Folder `training/`, as `loopergy.training`."""
