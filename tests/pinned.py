"""A mark for what depends on the pinned transformers: families that older releases lack, or compute otherwise."""

from pathlib import Path

import pytest
import transformers
from packaging.version import Version

_PINS = (Path(__file__).resolve().parents[1] / "requirements.txt").read_text()
_PINNED = next(
    line.removeprefix("transformers==")
    for line in _PINS.splitlines()
    if line.startswith("transformers==")
)

pinned_transformers = pytest.mark.skipif(
    Version(transformers.__version__) < Version(_PINNED),
    reason=f"is about families of transformers {_PINNED}, and this is {transformers.__version__}",
)
