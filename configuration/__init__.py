# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Config classes and the checks of their fields. Folder `configuration/`, imported as `loopergy.configuration`."""
