"""Qwen's and SmolVLM's processors need torchvision, whose wheel does not load beside a CPU build of PyTorch.

``operators`` mends that, at the cost of importing torch in every program; so torchvision lies in a folder of its own,
and tests/run.sh names it in PYTHONPATH for these tests alone.
"""

import importlib.util

collect_ignore = []
if importlib.util.find_spec("torchvision") is None:
    collect_ignore.append("test_processors.py")
else:
    import tests.processors.operators.sitecustomize  # noqa: F401
