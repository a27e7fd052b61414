# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the recurrences that mixers call. Folder `modeling/kernels/`, imported as `loopergy.modeling.kernels`."""
