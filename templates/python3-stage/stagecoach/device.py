"""The device that a replica computes on, and how parameters get there.

On the CPU, everything stays where it is: a model's tensors are used in the pages of its files. On a
device, PyTorch's objects go into one allocation, through a ring of pinned buffers, while the
libraries with the kernels are loaded. A parked child or a worker makes the context, the ring and
the libraries ready beforehand.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import sys
import threading
import time
from typing import Any, Protocol

from . import _ring
from ._move import Slot, State, layout, view
from ._types import OutOfMemory, StageError, out_of_memory

# The device's UUID, a colon and the text follow; package wire has the same constant.
OUT_OF_MEMORY_ON = "out of memory on device "
VISIBLE = "CUDA_VISIBLE_DEVICES"


def name() -> str:
    """Return the replica's device for torch: "cuda:0" if its environment names one
    (CUDA_VISIBLE_DEVICES), else "cpu"."""
    return "cuda:0" if os.environ.get(VISIBLE, "") not in ("", "-1", "none", "NoDevFiles") else "cpu"


class Backend(_ring.Backend, Protocol):
    """The operations that a :class:`Device` needs from its backend, unless it is the CPU."""

    def context(self) -> None:
        """Make the process's context on the device."""

    def warm(self, dtypes: set[Any]) -> None:
        """Run some first kernels on these types, and wait for them."""

    def memory(self) -> tuple[int, int]:
        """Return the free and the total memory of the device, in bytes."""


class _Spent(threading.local):
    """A thread's times on a device. In a worker, each replica places its state in a thread of its
    own."""

    def __init__(self) -> None:
        # Seconds of the context, copies and first kernels; bytes copied.
        self.times: dict[str, float] = {}


class Device:
    """A process's device. Any thread may use it; one at a time does."""

    def __init__(self, device: str = "cpu", keep: bool = False, backend: Backend | None = None) -> None:
        """``device`` is torch's name: "cpu" or "cuda:0". ``keep`` is true if more states will be
        placed. The default backend is CUDA's."""
        self.name = device
        self._keep = keep
        self._backend = backend
        self._lock = threading.RLock()
        self._ring: _ring.Ring | None = None
        self._warm: set[Any] = set()  # types on which kernels have run
        self._spent = _Spent()

    @property
    def _times(self) -> dict[str, float]:
        """The calling thread's times since it has logged some."""
        return self._spent.times

    def _open(self, torch: Any) -> tuple[Backend, _ring.Ring]:
        """Return the backend, with its context made, and the ring."""
        if self._backend is None:
            self._backend = _Cuda(torch, self.name)
        if self._ring is None:
            if not self._warm:
                began = time.monotonic()
                self._backend.context()
                self._times["context"] = time.monotonic() - began
            self._ring = _ring.Ring(self._backend)
        return self._backend, self._ring

    def ready(self) -> None:
        """Prepare everything that does not depend on the parameters."""
        torch = sys.modules.get("torch")
        if self.name == "cpu" or torch is None:
            return
        with self._lock:
            used = _used()
            try:
                backend, ring = self._open(torch)
                ring.prepare()
                self._kernels(backend, {torch.float32, torch.float16, torch.bfloat16})
            except Exception as err:
                raise memory_error(err, self._backend) if out_of_memory(err) else err
            after = _used()
            self._log(f"is ready and {(after - used) / 1e9:.2f} GB of it taken" if 0 <= used < after else "is ready")

    def place(self, state: Any) -> Any:
        """Return state with PyTorch's modules and tensors on the device, also those in dicts,
        lists, tuples and dataclasses. Modules are changed in place. On the CPU, and without
        PyTorch, the result is the state itself."""
        torch = sys.modules.get("torch")
        if self.name == "cpu" or torch is None:
            return state
        with self._lock, torch.no_grad():
            found = State(torch, state)
            if not found.tensors:
                return state
            slots, sources, size = layout(torch, list(found.tensors.values()))
            try:
                backend, ring = self._open(torch)
                flat = backend.allocate(size)
                sources, files = _ring.opened(sources)
                try:
                    dtypes = {t.dtype for t in found.tensors.values() if t.is_floating_point()}
                    seconds = ring.copy(sources, flat, lambda: self._kernels(backend, dtypes))
                finally:
                    for fd in files:
                        os.close(fd)
                moved = found.moved(lambda t: _moved(torch, t, slots.get(id(t)), flat))
            except Exception as err:
                if out_of_memory(err) and OUT_OF_MEMORY_ON not in str(err):
                    raise memory_error(err, self._backend, size) from err
                raise
            self._times["copy"] = self._times.get("copy", 0.0) + seconds
            self._times["bytes"] = self._times.get("bytes", 0) + size
            return moved

    def _kernels(self, backend: Backend, dtypes: set[Any]) -> None:
        """Run first kernels on these types."""
        new = dtypes - self._warm
        if new:
            began = time.monotonic()
            backend.warm(new)
            self._warm |= new
            self._times["kernels"] = self._times.get("kernels", 0.0) + time.monotonic() - began

    def placed(self) -> None:
        """Log the times after this thread has placed a state. Free the ring, unless another state
        will follow."""
        with self._lock:
            if "bytes" in self._times:
                self._log("has its parameters")
            if self._ring is not None and not self._keep:
                self._ring.close()
                self._ring = None

    def _log(self, what: str) -> None:
        """Log the times so far, and forget them."""
        t, self._spent.times = self._times, {}
        parts = [f"context {t['context']:.3f} s"] if "context" in t else []
        if "bytes" in t:
            speed = t["bytes"] / 1e9 / max(t["copy"], 1e-9)
            parts.append(f"{t['bytes'] / 1e9:.3f} GB copied in {t['copy']:.4f} s ({speed:.1f} GB/s)")
        if "kernels" in t:
            parts.append(f"first kernels {t['kernels']:.3f} s")
        logging.getLogger("stagecoach").info("device %s %s: %s", os.environ.get(VISIBLE, ""), what, ", ".join(parts))


def _moved(torch: Any, t: Any, slot: Slot | None, flat: Any) -> Any:
    """Return the tensor on the device: in the flat allocation, or as a separate copy."""
    if slot is None:
        return t.to(flat.device)
    out = view(flat, slot)
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(out, requires_grad=t.requires_grad)
    return out.requires_grad_(t.requires_grad)


class _Cuda(_ring.Cuda):
    """The backend for CUDA, through PyTorch."""

    def context(self) -> None:
        cuda = self._torch.cuda
        if self._torch.version.cuda is None:
            raise StageError(
                f"PyTorch {self._torch.__version__} of {sys.executable} is not made for CUDA: install one that is, or "
                "name another interpreter in the function's fprocess (/opt/venv/bin/python ./stage)"
            )
        # Discard the result of the zygote, which has no device.
        if hasattr(cuda.device_count, "cache_clear"):
            cuda.device_count.cache_clear()
        if getattr(cuda, "_is_in_bad_fork", lambda: False)():
            raise StageError(
                "CUDA was asked for devices while the handler was imported or loaded, and is of no use after a "
                "fork: leave torch.cuda to the place hook"
            )
        cuda.init()
        cuda.set_device(0)
        self._torch.empty(1, device=self._device)

    def warm(self, dtypes: set[Any]) -> None:
        torch = self._torch
        for dtype in dtypes & {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
            a = torch.ones(64, 64, dtype=dtype, device=self._device)
            torch.softmax(torch.nn.functional.linear(a, a, a[0]), -1).add_(a)
        torch.cuda.current_stream().synchronize()

    def memory(self) -> tuple[int, int]:
        free, total = self._torch.cuda.mem_get_info()
        return free, total


def memory_error(err: BaseException, backend: Backend | None = None, want: int = 0) -> OutOfMemory:
    """Return the error for a device that lacks memory, with the sizes in its text. want is in
    bytes. Free PyTorch's cached memory first."""
    torch = sys.modules.get("torch")
    tried = re.search(r"[Tt]ried to allocate ([0-9.]+ [A-Za-z]+)", str(err))
    wanted = f"want {want / 1e9:.2f} GB, " if want else f"want {tried.group(1)}, " if tried else ""
    sizes = str(err)
    try:
        if backend is None and torch is not None and torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()
            backend = _Cuda(torch, "cuda:0")
        if backend is not None:
            free, total = backend.memory()
            sizes = f"{free / 1e9:.2f} of {total / 1e9:.2f} GB free"
    except RuntimeError:  # the device reports no sizes
        pass
    return OutOfMemory(f"{OUT_OF_MEMORY_ON}{os.environ.get(VISIBLE, '')}: {wanted}{sizes}")


def with_sizes(results: list[Any]) -> list[Any]:
    """Return the results of calls, with the sizes added to errors of a device that was out of
    memory."""
    new: dict[int, OutOfMemory] = {}
    for r in results:
        if isinstance(r, Exception) and not isinstance(r, OutOfMemory) and out_of_memory(r) and id(r) not in new:
            new[id(r)] = memory_error(r)
    return [new.get(id(r), r) for r in results] if new else results


def context_error(results: list[Any]) -> str:
    """Return why the process's context on the device is of no more use, after some errors of CUDA
    in results. Return "" if it can be used."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and any(isinstance(r, RuntimeError) for r in results):
        try:
            if cuda.is_initialized():
                cuda.synchronize()
        except RuntimeError as err:
            return str(err)
    return ""


def _used() -> int:
    """Return the bytes in use on the device, as its driver reports them before there is a context;
    -1 means unknown."""
    sizes = (ctypes.c_ulonglong * 3)()  # total, free, used
    handle = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = os.environ.get(VISIBLE, "").encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return -1
        return -1 if nvml.nvmlDeviceGetMemoryInfo(handle, sizes) else sizes[2]
    except (OSError, AttributeError):
        return -1
