"""SmolLM2 for the tests marked `model`: skipped where it was not fetched, a failure in CI, which fetches it first."""

import os
from pathlib import Path

from kvbus.engines.model_cache import default_folder, is_ready
from tests.absent import absent


def smollm2_folder() -> Path:
    """Return the model's folder in the cache."""
    folder = default_folder(os.environ)
    if not is_ready(folder):
        absent("SmolLM2 is not in the model cache; run scripts/get_model")
    return folder
