"""What a start costs."""

import subprocess
import sys


def test_deepspeeds_muon_does_not_load_the_compiler() -> None:
    """DeepSpeed imports it in the first optimizer step, whatever the optimizer."""
    loaded = """
import sys
import openppo.strategy.deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer
print("torch._inductor.compile_fx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
