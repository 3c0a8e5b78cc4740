"""Has PyTorch without CUDA look as if it had a device, of which each look at its free memory finds 100 MB less: what is there
lies in host memory. For scripts that are to be tried without one."""
from __future__ import annotations

import contextlib
import itertools
from typing import Any, Callable

import torch


def in_host_memory(make: Callable[..., Any]) -> Callable[..., Any]:
    """Make tensors without a device."""

    def made(*args: Any, device: str = "", pin_memory: bool = False, **more: Any) -> Any:
        return make(*args, **more)

    return made


for name in ("empty", "zeros", "ones"):
    setattr(torch, name, in_host_memory(getattr(torch, name)))
looks = itertools.count()
torch.cuda.Stream = object
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.cuda.synchronize = lambda: None
torch.cuda.mem_get_info = lambda device: (10**12 - next(looks) * 10**8, 10**12)
