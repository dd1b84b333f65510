"""Free memory of a device."""

import torch


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a GPU, unused memory of torch's allocator included; None for a CPU."""
    if device.type != "cuda":
        return None

    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
