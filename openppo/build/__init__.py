"""From options to a trainer, in phases that return small frozen results."""

import openppo.trainer  # noqa: F401 (tells DeepSpeed the device before any module here loads it)
