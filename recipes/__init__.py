# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the recipes, read by `loopergy run`, the demo and `accelerate launch`; they travel with the package.

Folder `recipes/`, imported as `loopergy.recipes`. A recipe's name is its path there without the suffix, such as
`smollm2-135m`, or `accelerate/ddp` for a file that tells accelerate how to spread a run over GPUs.
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def recipe_files() -> dict[str, Path]:
    """Return the files of all recipes by name."""
    files = sorted(FOLDER.rglob("*.yaml"))
    return {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files}


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        name (`str` or `Path`): A file of your own, or the name of one that travels with the package; `recipes/` before
            it and `.yaml` behind it may stand there.

    Raises:
        FileNotFoundError: For neither of the two.
    """
    if Path(name).is_file():
        return Path(name)
    known = recipe_files()
    wanted = str(name).removeprefix("recipes/").removesuffix(".yaml")
    if wanted not in known:
        raise FileNotFoundError(f"{name} is neither a file nor a recipe of the package: {', '.join(known)}")
    return known[wanted]
