"""liger-kernel on a CPU, by Triton's interpreter: import this first, with ``TRITON_INTERPRET=1``."""

import types
from typing import Any

import torch
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from triton.runtime import interpreter


class _Scalar(float):
    """The interpreter hands numbers of Python to kernels, which call ``to`` on theirs."""

    def to(self, _: Any) -> "_Scalar":
        return self


_convert = interpreter._implicit_cvt
interpreter._implicit_cvt = lambda value: (
    _Scalar(value) if isinstance(value, float) else _convert(value)
)
# CUDA's library of functions is not interpreted.
rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)
geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(multi_processor_count=2)
