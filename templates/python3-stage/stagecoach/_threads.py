"""Sets the number of threads that a process computes with: those of PyTorch, and of the BLAS of
PyTorch and numpy."""
from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import threading
from typing import Any

# Libraries read these variables when they are loaded.
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# The function's name in builds of OpenBLAS: Debian's, numpy's wheels.
_SETTERS = ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
            "scipy_openblas_set_num_threads64_")

# GCC's, LLVM's, Intel's; wheels put a hash into the name.
_OPENMP = re.compile(r"lib(gomp|omp|iomp5)\b.*\.so")
# This function ends the threads. It is part of OpenMP 5, which GCC has from version 9 on.
_PAUSE = "omp_pause_resource_all"
_OMP_PAUSE_HARD = 2


def compute_with(total: int) -> None:
    """Set the number of threads that PyTorch and each OpenBLAS compute with to ``total``, including
    the calling thread. This has an effect on libraries that are loaded already. Later libraries use
    the environment's :data:`VARIABLES`."""
    for setter in _openblas():
        setter(total)
    # PyTorch comes last, because an OpenBLAS over OpenMP uses the same number.
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads") and torch.get_num_threads() != total:
        torch.set_num_threads(total)


@functools.lru_cache(maxsize=1)
def _openblas() -> list[Any]:
    """Return the function that sets the number of threads, for each OpenBLAS that was loaded before
    the first call."""
    found = []
    for path in sorted({path for _, _, path in mappings() if "openblas" in path}):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # a file with such a name that is no library
            continue
        found += [getattr(library, name) for name in _SETTERS if hasattr(library, name)][:1]
    return found


def load_with(total: int) -> None:
    """Set the number of OpenMP threads that the calling thread computes with to ``total``. They
    start on demand.

    torch.compile makes code for the current number of threads, and compiles again if a call
    finds another number. A runtime whose threads :func:`end_openmp` cannot end keeps its number,
    which is 1 in a zygote: threads that cannot be ended would keep the process from being
    forked."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        torch.get_num_threads()  # the first call sets the number for this thread, to MKL's number
    for library in _openmp():
        if hasattr(library, _PAUSE):
            library.omp_set_num_threads(total)


def end_openmp() -> None:
    """End OpenMP's threads, and make the calling thread compute alone. The libraries start threads
    again when they need them."""
    for library in _openmp():
        library.omp_set_num_threads(1)
        if hasattr(library, _PAUSE):
            getattr(library, _PAUSE)(_OMP_PAUSE_HARD)


def _openmp() -> list[Any]:
    """Return the OpenMP runtimes that this process has loaded."""
    found = []
    for path in sorted({path for _, _, path in mappings() if _OPENMP.match(os.path.basename(path))}):
        try:
            found.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
        except OSError:  # a file with such a name that is no library
            continue
    return [library for library in found if hasattr(library, "omp_set_num_threads")]


def end_progress_bars() -> None:
    """End the threads of tqdm's progress bars, which are shown while models load. Each class of
    bars has one thread, and starts another with its next bar."""
    for thread in threading.enumerate():
        if type(thread).__module__ == "tqdm._monitor":
            thread.exit()  # also joins it


def mappings(path: str = "/proc/self/maps") -> list[tuple[int, int, str]]:
    """Return the files that a process has mapped: begin and end in memory, and path."""
    out = []
    with open(path, encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                start, _, end = fields[0].partition("-")
                out.append((int(start, 16), int(end, 16), fields[5]))
    return out
