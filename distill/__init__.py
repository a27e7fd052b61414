# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Train a converted student, one file a stage. Folder `distill/`, imported as `loopergy.distill`."""
