"""Where a replica computes, and how parameters get there.

On the CPU all stays where it is: tensors of a model are used in the pages of its files. On a device, what is
PyTorch's goes into one allocation there, through a ring of pinned buffers; while it is on its way, the libraries that
kernels come from are loaded. A process that has its device ahead of need, parked or a worker, has made the context,
the ring and those libraries ready before.
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

OUT_OF_MEMORY_ON = "out of memory on device "  # the device's UUID, a colon and the rest follow; package wire has it
VISIBLE = "CUDA_VISIBLE_DEVICES"


def name() -> str:
    """The replica's device for torch: "cuda:0" when its environment names one (CUDA_VISIBLE_DEVICES), else "cpu"."""
    return "cuda:0" if os.environ.get(VISIBLE, "") not in ("", "-1", "none", "NoDevFiles") else "cpu"


class Backend(_ring.Backend, Protocol):
    """What a :class:`Device` needs of one that is no CPU."""

    def context(self) -> None:
        """Make the process's context on the device."""

    def warm(self, dtypes: set[Any]) -> None:
        """Run some first kernels on these types, and wait for them."""

    def memory(self) -> tuple[int, int]:
        """How many bytes are free on the device, and how many it has."""


class Device:
    """A process's device. Any thread may use it; one at a time does."""

    def __init__(self, device: str = "cpu", keep: bool = False, backend: Backend | None = None) -> None:
        """device is for torch: "cpu", "cuda:0"; keep says that more than one state will be placed; the backend is
        CUDA's by default."""
        self.name = device
        self._keep = keep
        self._backend = backend
        self._lock = threading.RLock()
        self._ring: _ring.Ring | None = None
        self._warm: set[Any] = set()  # types on which kernels have run
        self._times: dict[str, float] = {}  # seconds of the context, copies and first kernels, and bytes copied

    def _open(self, torch: Any) -> tuple[Backend, _ring.Ring]:
        """The backend, with the context made, and the ring."""
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
        """Make all ready that is the same for any parameters, ahead of need."""
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
                raise lack(err, self._backend) if out_of_memory(err) else err
            after = _used()
            self._log(f"is ready and {(after - used) / 1e9:.2f} GB of it taken" if 0 <= used < after else "is ready")

    def place(self, state: Any) -> Any:
        """Return state with PyTorch's modules and tensors, also those in dicts, lists, tuples and dataclasses, on the
        device. Modules are changed in place. On the CPU, and without PyTorch, it is the state itself."""
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
                    raise lack(err, self._backend, size) from err
                raise
            self._times["copy"] = self._times.get("copy", 0.0) + seconds
            self._times["bytes"] = self._times.get("bytes", 0) + size
            return moved

    def _kernels(self, backend: Backend, dtypes: set[Any]) -> None:
        """Have run kernels on these types."""
        new = dtypes - self._warm
        if new:
            began = time.monotonic()
            backend.warm(new)
            self._warm |= new
            self._times["kernels"] = self._times.get("kernels", 0.0) + time.monotonic() - began

    def placed(self) -> None:
        """A state is placed: say how long that took, and give the ring back, unless there will be another state."""
        with self._lock:
            if "bytes" in self._times:
                self._log("has its parameters")
            if self._ring is not None and not self._keep:
                self._ring.close()
                self._ring = None

    def _log(self, what: str) -> None:
        """Log the times so far, and forget them."""
        t, self._times = self._times, {}
        parts = [f"context {t['context']:.3f} s"] if "context" in t else []
        if "bytes" in t:
            speed = t["bytes"] / 1e9 / max(t["copy"], 1e-9)
            parts.append(f"{t['bytes'] / 1e9:.3f} GB copied in {t['copy']:.4f} s ({speed:.1f} GB/s)")
        if "kernels" in t:
            parts.append(f"first kernels {t['kernels']:.3f} s")
        logging.getLogger("stagecoach").info("device %s %s: %s", os.environ.get(VISIBLE, ""), what, ", ".join(parts))


def _moved(torch: Any, t: Any, slot: Slot | None, flat: Any) -> Any:
    """The tensor on the device: in the flat allocation, or by a way of its own."""
    if slot is None:
        return t.to(flat.device)
    out = view(flat, slot)
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(out, requires_grad=t.requires_grad)
    return out.requires_grad_(t.requires_grad)


class _Cuda(_ring.Cuda):
    """CUDA, by PyTorch."""

    def context(self) -> None:
        cuda = self._torch.cuda
        if self._torch.version.cuda is None:
            raise StageError(
                f"PyTorch {self._torch.__version__} of {sys.executable} is not made for CUDA: install one that is, or "
                "name another interpreter in the function's fprocess (/opt/venv/bin/python ./stage)"
            )
        if hasattr(cuda.device_count, "cache_clear"):  # what the zygote saw, which has no device
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


def lack(err: BaseException, backend: Backend | None = None, want: int = 0) -> OutOfMemory:
    """The error of a device that has not the memory, with its sizes. What PyTorch holds for later use is freed
    before. want: bytes."""
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
    except RuntimeError:  # the device says no more
        pass
    return OutOfMemory(f"{OUT_OF_MEMORY_ON}{os.environ.get(VISIBLE, '')}: {wanted}{sizes}")


def relieved(results: list[Any]) -> list[Any]:
    """What calls have ended with, with the sizes in the errors of a device that was out of memory."""
    new: dict[int, OutOfMemory] = {}
    for r in results:
        if isinstance(r, Exception) and not isinstance(r, OutOfMemory) and out_of_memory(r) and id(r) not in new:
            new[id(r)] = lack(r)
    return [new.get(id(r), r) for r in results] if new else results


def lost(results: list[Any]) -> str:
    """Why the process's context on the device is of no more use, as some errors of CUDA that calls end with leave it;
    empty: it is of use."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and any(isinstance(r, RuntimeError) for r in results):
        try:
            if cuda.is_initialized():
                cuda.synchronize()
        except RuntimeError as err:
            return str(err)
    return ""


def _used() -> int:
    """How many bytes of the device are in use, as its driver says it before there is a context; -1: nobody knows."""
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
