"""Where a model is computed: the CPU, or a CUDA device."""

import torch

from relax.errors import ModelError


def pick_device(name: str) -> torch.device:
    """`auto` is a CUDA device if there is one. Raises `ModelError` for a device that this machine does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is not a device; use auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return device
