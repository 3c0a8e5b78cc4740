"""How many threads a process computes with: PyTorch's, and those of the BLAS under it and under numpy."""
from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
from typing import Any

# Read by the libraries when they are loaded.
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# What builds of OpenBLAS call it: Debian's, numpy's wheels.
_SETTERS = ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
            "scipy_openblas_set_num_threads64_")

_OPENMP = re.compile(r"lib(gomp|omp|iomp5)\b.*\.so")  # GCC's, LLVM's, Intel's; wheels put a hash into the name
_PAUSE = "omp_pause_resource_all"  # ends threads; of OpenMP 5, which GCC has from version 9 on
_OMP_PAUSE_HARD = 2


def compute_with(total: int) -> None:
    """Have so many threads compute from now on, the calling one included, in the libraries that are loaded. What is
    loaded later goes by the environment's :data:`VARIABLES`."""
    for setter in _openblas():
        setter(total)
    torch = sys.modules.get("torch")  # comes last: an OpenBLAS over OpenMP takes its number along
    if torch is not None and hasattr(torch, "set_num_threads") and torch.get_num_threads() != total:
        torch.set_num_threads(total)


@functools.lru_cache(maxsize=1)
def _openblas() -> list[Any]:
    """The function that sets the number of threads, of each OpenBLAS that this process has loaded by the first call."""
    found = []
    for path in sorted({path for _, _, path in mappings() if "openblas" in path}):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # a file of that name that is no library
            continue
        found += [getattr(library, name) for name in _SETTERS if hasattr(library, name)][:1]
    return found


def load_with(total: int) -> None:
    """Have the calling thread compute with so many threads of OpenMP, which start when they are first needed.

    torch.compile makes code for the number of threads that there is, and compiles again when a call finds another. A
    runtime whose threads :func:`end_openmp` cannot end starts none: they would keep the process from being forked."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        torch.get_num_threads()  # sets the number for this thread when it is first called, to MKL's
    for library in _openmp():
        if hasattr(library, _PAUSE):
            library.omp_set_num_threads(total)


def end_openmp() -> None:
    """End OpenMP's threads, and have the calling thread compute alone. The libraries start others when they compute
    with more again."""
    for library in _openmp():
        library.omp_set_num_threads(1)
        if hasattr(library, _PAUSE):
            getattr(library, _PAUSE)(_OMP_PAUSE_HARD)


def _openmp() -> list[Any]:
    """The runtimes of OpenMP that this process has loaded."""
    found = []
    for path in sorted({path for _, _, path in mappings() if _OPENMP.match(os.path.basename(path))}):
        try:
            found.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
        except OSError:  # a file of that name that is no library
            continue
    return [library for library in found if hasattr(library, "omp_set_num_threads")]


def end_progress_bars() -> None:
    """End the threads that look after progress bars of tqdm, which loading models shows. Each class of bars has one of
    its own, and starts another with its next bar."""
    for thread in threading.enumerate():
        if type(thread).__module__ == "tqdm._monitor":
            thread.exit()  # type: ignore[attr-defined]  # and joins it


def mappings(path: str = "/proc/self/maps") -> list[tuple[int, int, str]]:
    """The files that a process has mapped: start and end in memory, path."""
    out = []
    with open(path, encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                start, _, end = fields[0].partition("-")
                out.append((int(start, 16), int(end, 16), fields[5]))
    return out
