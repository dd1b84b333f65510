"""Declares two operators that torchvision misses beside a CPU build of PyTorch, and that nothing here calls.

Any program does so that has this folder in its PYTHONPATH.
"""

import torch

if not (torch.cuda.is_available() or hasattr(torch.ops.torchvision, "nms")):
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
