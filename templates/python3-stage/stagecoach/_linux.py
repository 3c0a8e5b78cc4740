"""System calls of Linux that Python's standard library lacks, through the C library."""
from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_GET_NAME = 1, 4, 15, 16
CLONE_FS = 0x200
SFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
MADV_WILLNEED, MADV_POPULATE_READ = 3, 22  # MADV_POPULATE_READ needs Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(what: int, argument: object, name: str) -> None:
    if _libc.prctl(what, argument, 0, 0, 0) < 0:
        raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")


def seal() -> None:
    """Keep other processes of the same user from looking into this process and its children."""
    _prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0), "dumpable")


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), "parent-death signal")


def name() -> bytes:
    """Return the name of this process, as ps shows it."""
    out = ctypes.create_string_buffer(16)
    _prctl(PR_GET_NAME, out, "name")
    return out.value


def rename(to: bytes) -> None:
    """Set the name of this process. It has at most 15 bytes."""
    _prctl(PR_SET_NAME, ctypes.c_char_p(to), "name")


def signalfd(number: int) -> int:
    """Return a descriptor that is readable once a blocked signal has come."""
    mask = (ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    _libc.sigemptyset(mask)
    _libc.sigaddset(mask, int(number))
    fd = _libc.signalfd(-1, mask, SFD_FLAGS)
    if fd < 0:
        raise OSError(f"signalfd: {os.strerror(ctypes.get_errno())}")
    return fd


def own_folder() -> None:
    """Give the calling thread its own working directory. Threads that it starts share it."""
    if _libc.unshare(CLONE_FS) < 0:
        raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")


def populate(start: int, end: int) -> None:
    """Read the file mappings between two addresses into memory. An older kernel is only asked to
    read them soon."""
    at, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
    if _libc.madvise(at, size, MADV_POPULATE_READ) != 0:
        _libc.madvise(at, size, MADV_WILLNEED)  # only advice for the kernel


def trim() -> None:
    """Return freed memory to the kernel, and write the buffered output of C code."""
    if hasattr(_libc, "malloc_trim"):  # only glibc has it
        _libc.malloc_trim(0)
    _libc.fflush(None)
