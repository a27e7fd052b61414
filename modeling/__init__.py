# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the models, the loop cache and their parts. Folder `modeling/`, imported as `loopergy.modeling`."""
