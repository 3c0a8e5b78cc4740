"""Where a replica computes, and how a state's parameters get there."""

from __future__ import annotations

import os
import sys
from typing import Any


def name() -> str:
    """The replica's device for torch: "cuda:0" when its environment names one (CUDA_VISIBLE_DEVICES), else "cpu"."""
    return "cuda:0" if os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1", "none", "NoDevFiles") else "cpu"


def place(state: Any, device: str) -> Any:
    """Return state with PyTorch's modules and tensors, also those in dicts, lists and tuples, on the device. On the
    CPU, and without PyTorch, it is the state itself."""
    torch = sys.modules.get("torch")
    if device == "cpu" or torch is None:
        return state
    return _move(state, device, torch)


def _move(state: Any, device: str, torch: Any) -> Any:
    if isinstance(state, (torch.nn.Module, torch.Tensor)):
        return state.to(device)
    if type(state) is dict:
        return {k: _move(v, device, torch) for k, v in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_move(v, device, torch) for v in state)
    return state
