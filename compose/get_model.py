# noqa: INP001 - a program of the stories
"""Puts the model into the folder that KVBUS_MODEL_HOME names, unless one is there."""

import os
import sys

from kvbus.engines.model_cache import default_folder, ensure_model

if __name__ == "__main__":
    folder = default_folder(os.environ)
    if (folder / "config.json").is_file():
        sys.stdout.write(f"a model is in {folder}\n")
    else:
        ensure_model(folder)
        sys.stdout.write(f"the model was fetched into {folder}\n")
