# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Small tasks to train and measure any causal language model on. Folder `tasks/`, imported as `loopergy.tasks`."""
