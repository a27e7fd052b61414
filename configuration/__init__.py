# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold what a model is: sizes, loops, mixers. Folder `configuration/`, imported as `loopergy.configuration`."""
