"""Qwen's and SmolVLM's processors need torchvision, whose wheel does not load beside a CPU build of PyTorch.

Two operators that it registers are missing there, and nothing here calls them: they are declared. That cannot be done
for the programs that other tests start, so torchvision lies in a folder of its own, and tests/run.sh names it in
PYTHONPATH for these tests alone.
"""

import importlib.util

import torch

collect_ignore = []
if importlib.util.find_spec("torchvision") is None:
    collect_ignore.append("test_processors.py")
elif not torch.cuda.is_available():
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
