"""Gives a PyTorch without CUDA a stand-in for a device, in each process whose PYTHONPATH has this folder.

What is on the stand-in is in host memory. Each query of its free memory returns 100 MB less than the one before."""
from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import itertools
import sys
import time
from types import SimpleNamespace
from typing import Any, Callable

WORK = 0.002  # seconds that a context and first kernels take, so that there is something to measure


class Event:
    """A point in a stream's work. The stream does all work at once, so there is nothing to wait for."""

    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    """A stream that does each piece of work at once."""

    def __init__(self, device: str = "") -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        time.sleep(WORK)


def on_host(device: Any) -> Any:
    """Return where a tensor goes that is meant for this device: the stand-in is in host memory."""
    return "cpu" if str(device).startswith("cuda") else device


def in_host_memory(torch: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a maker of tensors, so that it makes them in host memory. Halves become floats, because old PyTorch cannot
    compute with halves on a CPU."""

    @functools.wraps(make)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **more: Any) -> Any:
        if more.get("dtype") is torch.float16 and on_host(device) != device:
            more["dtype"] = torch.float32
        return make(*args, device=on_host(device), **more)

    return made


def staying(to: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method ``to``, so that it leaves tensors for the device in host memory."""

    @functools.wraps(to)
    def moved(self: Any, *args: Any, **more: Any) -> Any:
        return to(self, *(on_host(a) if isinstance(a, str) else a for a in args), **more)

    return moved


def install(torch: Any) -> None:
    """Give PyTorch the device."""
    for name in ("empty", "zeros", "ones"):
        setattr(torch, name, in_host_memory(torch, getattr(torch, name)))
    torch.Tensor.to = staying(torch.Tensor.to)
    torch.nn.Module.to = staying(torch.nn.Module.to)
    torch.version.cuda = "12.0"
    looks, now = itertools.count(), SimpleNamespace(stream=Stream(), initialised=False)
    stand_in = dict(
        Event=Event,
        Stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=lambda device=None: now.stream,
        set_stream=lambda stream: None,
        synchronize=lambda: None,
        init=lambda: (time.sleep(WORK), setattr(now, "initialised", True)),
        set_device=lambda device: None,
        is_available=lambda: True,
        is_initialized=lambda: now.initialised,
        device_count=lambda: 1,
        empty_cache=lambda: None,
        get_device_properties=lambda device: SimpleNamespace(name="Stand-in", total_memory=10**12),
        mem_get_info=lambda device=0: (10**12 - next(looks) * 10**8, 10**12),
        cudart=lambda: SimpleNamespace(cudaHostRegister=lambda *at: 0, cudaHostUnregister=lambda at: 0),
        _is_in_bad_fork=lambda: False,
    )
    for name, value in stand_in.items():
        setattr(torch.cuda, name, value)


class WhenImported(importlib.abc.MetaPathFinder):
    """Changes PyTorch after it has been imported, and imports it no sooner than the program does: a zygote must not."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                install(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, WhenImported())
