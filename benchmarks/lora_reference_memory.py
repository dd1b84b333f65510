"""Memory of PPO's reference with LoRA: the actor with its adapters off, against a separate frozen model.

    python benchmarks/lora_reference_memory.py

Each kind runs in a process of its own with the same actor (a Llama made from a config, float32, ZeRO-2, one rank), and
takes log-probs of the same sequences. Prints bytes of parameters, resident memory and the largest difference.
"""

import gc
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.models import Actor
from openppo.models.adapters import AdapterOffReference
from openppo.strategy import DeepspeedStrategy
from openppo.types import ModelInputs

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
}


def resident_mib() -> float:
    """Resident memory of this process."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def measure(kind: str, folder: Path) -> None:
    """Print one row, and write the log-probs to the folder."""
    strategy = DeepspeedStrategy(DeepSpeedConfig())
    actor = strategy.prepare(Actor(str(folder), lora_rank=16), AdamConfig(), 1e-5, total_steps=1)
    parameters = list(actor.module.parameters())
    sequences = torch.arange(256).view(2, 128)
    mask = torch.ones_like(sequences, dtype=torch.bool)
    with torch.no_grad():
        actor(
            ModelInputs(sequences, mask)
        )  # weights that are mapped from a file become resident when they are read
    before = resident_mib()
    if kind == "adapters off":
        reference = AdapterOffReference(actor)
    else:
        reference = strategy.prepare_frozen(Actor(str(folder)))
        parameters += list(reference.parameters())
    with torch.no_grad():
        log_probs = reference(ModelInputs(sequences, mask))
    torch.save(log_probs, folder / f"{kind}.pt")
    n_bytes = sum(p.numel() * p.element_size() for p in parameters)
    row = f"{kind:>14}  parameters of actor and reference {n_bytes / 2**20:7.1f} MiB"
    print(
        f"{row}  resident: actor {before:7.1f}, and its reference {resident_mib() - before:+7.1f} MiB",
        flush=True,
    )
    strategy.close()


def main() -> None:
    """Both kinds, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaForCausalLM(LlamaConfig(vocab_size=16000, **SIZES)).save_pretrained(folder)
        kinds = ("adapters off", "separate model")
        for kind in kinds:
            subprocess.run(
                [sys.executable, __file__, kind, name], check=True, stderr=subprocess.DEVNULL
            )
        ours, theirs = (torch.load(folder / f"{kind}.pt", weights_only=True) for kind in kinds)
        print(f"largest difference of a log-prob: {(ours - theirs).abs().max().item():.1e}")


if __name__ == "__main__":
    measure(sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 1 else main()
