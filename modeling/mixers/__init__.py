# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold what mixes tokens in a layer. Folder `modeling/mixers/`, imported as `loopergy.modeling.mixers`."""
