"""Checks whether a process can be forked: it has one thread, and has not used CUDA.

A child has only the thread that forked, and locks that other threads held stay locked. If the
process asked the CUDA driver for devices before the fork, each replica on a device fails. PyTorch's
own flag (``torch.cuda.is_initialized``) misses calls from PyTorch's C++ code, such as a backward
pass. So this module also checks the driver's state, the mappings and the open device files. The
driver may be loaded, because cuBLAS loads it when PyTorch is imported.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.abc
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Callable

from . import _threads

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = "libcuda.so.1"
NOT_INITIALISED = 3  # the driver's functions return this before cuInit
STUB = 34  # functions of a stub of the driver return this; programs are linked with one
NVML = "libnvidia-ml.so"  # it opens device files, too, but a fork survives that
DEVICES, UVM = "/dev/nvidia", "/dev/nvidia-uvm"  # NVML does not open the latter

_CURES = "move the code that needs a device to the place hook"


class Unforkable(Exception):
    """The handler loads, but a process that has loaded it cannot be forked."""


class Watch:
    """Finds the first line of the handler that made the process use CUDA's driver."""

    def __init__(self) -> None:
        self.what = self.line = ""  # the function that used CUDA, and the line; empty: not known
        # A function of PyTorch has asked the driver for devices, with or without success.
        self.asked = False
        self._undo: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def on(self) -> Iterator[Watch]:
        """Watch while the handler is imported and loads, and unwrap all functions afterwards."""
        watch = self

        class Finder(importlib.abc.MetaPathFinder):
            """Wraps PyTorch's functions when it is imported. Libraries may look for PyTorch before
            that."""

            looking = False

            def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
                if name != "torch" or self.looking:
                    return None
                self.looking = True
                try:
                    spec = importlib.util.find_spec(name)
                finally:
                    self.looking = False
                if spec is not None and spec.loader is not None:
                    loader: Any = spec.loader
                    run = loader.exec_module

                    def exec_module(module: ModuleType) -> None:
                        run(module)
                        if self in sys.meta_path:
                            watch.torch(module)

                    loader.exec_module = exec_module
                return spec

        finder = Finder()
        sys.meta_path.insert(0, finder)
        self._wrap(ctypes.CDLL, "__init__", "ctypes.CDLL", False)
        try:
            yield self
        finally:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
            for undo in reversed(self._undo):
                undo()

    def torch(self, torch: Any) -> None:
        """Watch the functions of PyTorch that ask the driver for devices. A build without CUDA has
        none."""
        if not hasattr(getattr(torch, "_C", None), "_cuda_getDeviceCount"):
            return

        def none() -> None:
            if not torch.cuda.is_initialized():
                raise RuntimeError("No CUDA GPUs are available")  # PyTorch's own text

        self._wrap(torch.cuda, "_lazy_init", "torch.cuda", True, none)
        self._wrap(torch._C, "_cuda_getDeviceCount", "torch.cuda.device_count", True, lambda: 0)
        self._wrap(torch.Tensor, "pin_memory", "torch.Tensor.pin_memory", True)
        self._wrap(torch.autograd, "backward", "a backward pass", True)
        self._wrap(torch.autograd, "grad", "torch.autograd.grad", True)

    def _wrap(self, owner: Any, name: str, what: str, asks: bool, hidden: Callable[[], Any] | None = None) -> None:
        """Watch the attribute ``name`` of ``owner``, which is a function. ``what`` is the
        function's name in messages. ``asks`` is true if it asks the driver for devices.

        If ``hidden`` is given, it is called in place of the function while the environment hides
        all devices. It returns or raises what the function would, without asking the driver.
        torch.compile needs these results."""
        call = getattr(owner, name, None)
        if call is None:
            return

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if hidden is not None and os.environ.get(VISIBLE) == "":
                return hidden()
            before = driver()
            try:
                return call(*args, **kwargs)
            finally:
                after = driver()
                if asks and after is not None and not self.asked:
                    self.what, self.line, self.asked = what, _line(), True
                elif after != before and not self.what and any(DRIVER.partition(".")[0] in str(a) for a in args):
                    self.what, self.line = what, _line()

        def undo() -> None:
            if vars(owner).get(name) is not watched:
                return  # other code has replaced it with a function that may call the watched one
            if own:
                setattr(owner, name, call)
            else:
                delattr(owner, name)

        own = name in vars(owner)
        setattr(owner, name, watched)
        self._undo.append(undo)


def check(watch: Watch) -> None:
    """Raise :class:`Unforkable` if this process has used CUDA, or has more than one thread."""
    why = cuda(watch)
    if why:
        by = f", by {watch.what}" if watch.what else ""
        at = f" at {watch.line}" if watch.line else ""
        raise Unforkable(f"CUDA was initialised{by}{at} while the handler was imported or loaded ({why}), and does "
                         f"not survive a fork: {_CURES}")
    others = _others()
    if not others:
        return
    names = {t.native_id: repr(t.name) for t in threading.enumerate()}
    who = ", ".join(sorted(names.get(t, _comm(t)) for t in others)[:8])
    raise Unforkable(f"{len(others) + 1} threads after loading, want 1: {who}; the handler, or a library that "
                     "it uses, has started threads; start them in the place hook, or end them in load, so that "
                     "replicas can be forked")


def end_threads() -> None:
    """End the threads of OpenMP and of tqdm's progress bars.

    Both libraries start their threads again when they need them.
    """
    _threads.end_progress_bars()
    _threads.end_openmp()


def cuda(watch: Watch) -> str:
    """Return the sign that this process has used CUDA, or ""."""
    torch = getattr(sys.modules.get("torch"), "cuda", None)
    if torch is not None and torch.is_initialized():
        return "torch.cuda.is_initialized() is true"
    code = driver()
    if code not in (None, NOT_INITIALISED):
        return f"{DRIVER} is initialised: cuDeviceGetCount returns {code}"
    files = device_files()
    if files:
        return f"it has {files[0]} open or mapped"
    if watch.asked:  # CUDA's runtime keeps the answer, so a child would find no devices either
        return f"CUDA's runtime has asked {DRIVER} for devices"
    return ""


def driver() -> int | None:
    """Return the status of CUDA's driver without initialising it. Return None if the driver is not
    loaded, or is only a stub."""
    try:
        handle = _open(DRIVER, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    library = ctypes.CDLL.__new__(ctypes.CDLL)  # CDLL itself may be watched
    _INIT(library, DRIVER, handle=handle)
    try:
        code = int(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
    except AttributeError:  # another library has the driver's name
        return NOT_INITIALISED
    return None if code == STUB else code


_INIT = ctypes.CDLL.__init__
_open: Callable[[str, int], int] = ctypes._dlopen  # type: ignore[attr-defined]


def device_files(folder: str = "/proc/self") -> list[str]:
    """Return the device files of NVIDIA that a process has open or mapped for CUDA.

    folder is the folder of the process in /proc.
    """
    found = set()
    for fd in os.listdir(folder + "/fd"):
        try:
            found.add(os.readlink(f"{folder}/fd/{fd}"))
        except OSError:  # the descriptor of the listing itself, which is closed by now
            pass
    mapped = {path for _, _, path in _threads.mappings(folder + "/maps")}
    begin = UVM if any(os.path.basename(path).startswith(NVML) for path in mapped) else DEVICES
    return sorted(path for path in found | mapped if path.startswith(begin))


def _others() -> list[int]:
    """Return the threads of this process except its first one."""
    others: list[int] = []
    for _ in range(100):  # a thread that was just joined may stay for a moment
        others = [int(t) for t in os.listdir("/proc/self/task") if int(t) != os.getpid()]
        if not others:
            break
        time.sleep(0.01)
    return others


def _comm(task: int) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as f:
            return f"{f.read().strip()} (not of Python)"
    except OSError:
        return "a thread that has just ended"


def _line() -> str:
    """Return the innermost line of the image's own modules on the stack, or ""."""
    ours, root = os.path.dirname(os.path.abspath(__file__)), os.getcwd() + os.sep
    for frame in reversed(traceback.extract_stack()):
        path = os.path.abspath(frame.filename)
        if os.path.isfile(path) and path.startswith(root) and not path.startswith((ours, root + "site-packages")):
            return f"{os.path.relpath(path)}:{frame.lineno}"
    return ""
