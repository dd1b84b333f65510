"""Jobs of the commands that train nothing: each loads what it needs, and ``fit()`` does the work."""

import openppo.trainer  # noqa: F401 (tells DeepSpeed the device before any module here loads it)
