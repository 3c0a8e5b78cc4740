"""Copies parameters to a device through a ring of pinned buffers.

The parameters go into one flat allocation on the device, which is divided into pieces. Several
threads, called lanes, copy one piece each. A lane has two pinned buffers and a stream of its own.
It reads the bytes of a piece from host memory or from the mapped file into one buffer, and copies
the other buffer to the device meanwhile. Neither step holds the interpreter's lock.

Each byte is read once by a processor and once by the device. A lane reads unchanged bytes of a
mapped file from the file, whose pages are in memory, and not through the mapping, because the first
access to each page of a mapping costs a page fault.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import time
from typing import Any, Callable, NamedTuple, Protocol, Sequence

ALIGN = 256  # bytes; alignment of tensors on the device
PIECE = 8 << 20  # bytes per buffer; copying takes 0.2 ms, of which Python takes a tenth
BUFFERS = 2  # per lane: one is filled while the other is copied
LANES = 12  # maximum; a processor copies 4 to 10 GB/s from the page cache, the bus about 50

MADV_DONTFORK, MADV_HUGEPAGE = 10, 14
_READ = 1 << 20  # bytes from which a file is read instead of its mapping


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class Backend(Protocol):
    """The operations that the ring needs from a device. Buffers and allocations are tensors of
    uint8."""

    def pinned(self, size: int) -> Any:
        """Return a pinned buffer in host memory, which the device can copy from by itself."""

    def unpin(self, buffers: Sequence[Any]) -> None:
        """Free buffers that the device no longer uses."""

    def allocate(self, size: int) -> Any:
        """Allocate memory on the device, for later work of the calling thread's stream."""

    def now(self) -> Event:
        """Return the event after all work that the calling thread's stream has so far."""

    def stream(self) -> Any:
        """Return a new stream."""

    def follow(self, stream: Any, event: Event) -> None:
        """Make the calling thread use the stream, whose later work waits for the event."""

    def copy(self, stream: Any, to: Any, buffer: Any) -> Event:
        """Copy a buffer on the calling thread's stream, without waiting. Return the event after the
        copy."""


class Source(NamedTuple):
    """Bytes that go to the device."""

    at: int  # offset in the flat allocation
    size: int
    address: int  # address in host memory
    file: int = -1  # descriptor of a file with the same bytes; -1: none
    offset: int = 0  # offset of the bytes in the file


class _Slot:
    """A buffer, and the event after its last copy."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.address = buffer.data_ptr()
        self.view = memoryview((ctypes.c_ubyte * buffer.numel()).from_address(self.address)).cast("B")
        self.sent: Event | None = None

    def wait(self) -> None:
        if self.sent is not None:
            self.sent.synchronize()
        self.sent = None

    def fill(self, begin: int, end: int, sources: Sequence[Source]) -> None:
        """Copy the bytes from begin to end of the flat allocation into this buffer. sources are
        those that overlap this range."""
        for s in sources:
            low, high = max(begin, s.at), min(end, s.at + s.size)
            if s.file < 0:
                if low < high:
                    # memmove releases the interpreter's lock.
                    ctypes.memmove(self.address + low - begin, s.address + low - s.at, high - low)
                continue
            while low < high:
                n = os.preadv(s.file, [self.view[low - begin : high - begin]], s.offset + low - s.at)
                if n == 0:
                    raise OSError(f"the model's file has become shorter: {high - low} bytes are missing in it")
                low += n


class _Lane:
    """The stream and the buffers of one thread. They outlive the thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.stream = backend.stream()
        self.slots: list[_Slot] = []

    def slot(self, turn: int, size: int) -> _Slot:
        """Return the buffer for a turn, of at least size bytes. Buffers are made on demand,
        because their memory is pinned: a small state has small buffers, and a lane with one
        piece has one buffer."""
        i = turn % BUFFERS
        if i == len(self.slots):
            self.slots.append(_Slot(self._backend.pinned(size)))
        elif self.slots[i].buffer.numel() < size:
            old, self.slots[i] = self.slots[i], _Slot(self._backend.pinned(size))
            old.wait()
            self._backend.unpin([old.buffer])
        return self.slots[i]


class Ring:
    """The lanes. One caller may use them at a time."""

    def __init__(self, backend: Backend, lanes: int = 0, piece: int = PIECE) -> None:
        """lanes is the number of lanes; 0 means one per processor, up to :data:`LANES`. piece is in
        bytes."""
        self._backend = backend
        self._piece = piece
        self._lanes: list[_Lane | None] = [None] * (lanes or min(LANES, len(os.sched_getaffinity(0))))

    def prepare(self) -> None:
        """Make all buffers before they are needed."""
        self._each(len(self._lanes), lambda lane: [lane.slot(i, self._piece) for i in range(BUFFERS)])

    def copy(self, sources: Sequence[Source], flat: Any, meanwhile: Callable[[], None] | None = None) -> float:
        """Copy sources, sorted by their place, into the flat allocation, and return the time in
        seconds. Call meanwhile() during the copy. After copy has returned or raised, no thread
        reads the sources or writes to the allocation."""
        starts = [s.at for s in sources]
        total = sources[-1].at + sources[-1].size if sources else 0
        size = min(self._piece, -(-total // mmap.PAGESIZE) * mmap.PAGESIZE)
        turns, failed = itertools.count(), threading.Event()
        now, began = self._backend.now(), time.monotonic()
        ends = [began]

        def work(lane: _Lane) -> None:
            self._backend.follow(lane.stream, now)
            try:
                for turn in itertools.count():
                    begin = next(turns) * self._piece
                    end = min(total, begin + self._piece)
                    if begin >= end or failed.is_set():
                        break
                    slot = lane.slot(turn, size)
                    slot.wait()
                    first = max(0, bisect.bisect_right(starts, begin) - 1)
                    slot.fill(begin, end, sources[first : bisect.bisect_left(starts, end)])
                    slot.sent = self._backend.copy(lane.stream, flat[begin:end], slot.buffer[: end - begin])
            except BaseException:
                failed.set()
                raise
            finally:
                for slot in lane.slots:
                    slot.wait()
            ends.append(time.monotonic())

        self._each(min(-(-total // self._piece), len(self._lanes)), work, meanwhile)
        return max(ends) - began

    def _each(self, n: int, work: Callable[[_Lane], object], meanwhile: Callable[[], None] | None = None) -> None:
        """Call ``work`` in ``n`` lanes at the same time, and ``meanwhile`` on the calling thread.
        When all calls have ended, raise the error of one of them, if there is one."""
        failed: list[BaseException] = []

        def run(i: int) -> None:
            try:
                lane = self._lanes[i]
                if lane is None:
                    lane = self._lanes[i] = _Lane(self._backend)
                work(lane)
            except BaseException as err:
                failed.append(err)

        threads = [threading.Thread(target=run, args=(i,), name=f"stagecoach-lane-{i}", daemon=True) for i in range(n)]
        try:
            for t in threads:
                t.start()
            if meanwhile is not None:
                meanwhile()
        except BaseException as err:
            failed.insert(0, err)
        for t in threads:
            if t.ident is not None:  # otherwise, the thread could not be started
                t.join()
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Free the buffers."""
        lanes, self._lanes = [lane for lane in self._lanes if lane is not None], [None] * len(self._lanes)
        slots = [slot for lane in lanes for slot in lane.slots]
        for slot in slots:
            slot.wait()
        self._backend.unpin([slot.buffer for slot in slots])


class Cuda:
    """The backend for CUDA, through PyTorch."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = device
        self._registered: set[int] = set()  # addresses of buffers that PyTorch has not allocated

    def pinned(self, size: int) -> Any:
        # Huge pages are pinned in a fraction of the time. Unlike PyTorch's own buffers, this memory
        # can be unpinned and freed. Children must not inherit the pages: a copy on write would
        # leave both processes without valid pinned pages.
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(MADV_DONTFORK)
        with contextlib.suppress(OSError):  # an older kernel lacks it
            memory.madvise(MADV_HUGEPAGE)
        buffer = self._torch.frombuffer(memory, dtype=self._torch.uint8)
        # memset does not hold the interpreter's lock or use PyTorch's threads.
        ctypes.memset(buffer.data_ptr(), 0, size)
        if int(self._torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)) != 0:
            return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        self._registered.add(buffer.data_ptr())
        return buffer

    def unpin(self, buffers: Sequence[Any]) -> None:
        for b in buffers:
            if b.data_ptr() in self._registered:
                self._registered.discard(b.data_ptr())
                self._torch.cuda.cudart().cudaHostUnregister(b.data_ptr())

    def allocate(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, device=self._device)

    def stream(self) -> Any:
        return self._torch.cuda.Stream(self._device)

    def now(self) -> Event:
        return self._torch.cuda.current_stream(self._device).record_event()

    def follow(self, stream: Any, event: Event) -> None:
        self._torch.cuda.set_stream(stream)  # of this thread only
        stream.wait_event(event)

    def copy(self, stream: Any, to: Any, buffer: Any) -> Event:
        to.copy_(buffer, non_blocking=True)
        event = self._torch.cuda.Event(blocking=True)  # waiting for it does not use a processor
        event.record(stream)
        return event


def opened(sources: Sequence[Source]) -> tuple[list[Source], list[int]]:
    """Open the files that sources are mapped from. Return the sources, each with the file and
    offset to read it from, and the descriptors of the files, which the caller closes. A source
    gets no file if it is small, if it was written to after it was mapped, or if its file no longer
    exists: it is read from memory."""
    mapped: list[_Mapped] = []
    if any(s.size >= _READ for s in sources):
        mapped = _unchanged() if _remembered is None else _remembered
    starts = [m.start for m in mapped]
    files: dict[str, int] = {}
    out = []
    for s in sources:
        i = bisect.bisect_right(starts, s.address) - 1
        if s.size >= _READ and i >= 0 and s.address + s.size <= mapped[i].end:
            m = mapped[i]
            if m.path not in files:
                files[m.path] = _open(m.path, m.inode)
            s = s._replace(file=files[m.path], offset=m.offset + s.address - m.start)
        out.append(s)
    return out, [fd for fd in files.values() if fd >= 0]


def remember_mappings() -> None:
    """Find the unchanged file mappings, for this process and its children. A zygote does this once,
    because it walks through all page tables. A child uses the result unless a place hook runs
    first, because the hook may write to parameters."""
    global _remembered
    _remembered = _unchanged()


def forget_mappings() -> None:
    """Make the next call of :func:`opened` look again, because parameters may be written to from
    now on."""
    global _remembered
    _remembered = None


class _Mapped(NamedTuple):
    start: int
    end: int
    offset: int  # offset in the file
    inode: int
    path: str


_remembered: list[_Mapped] | None = None


def _unchanged() -> list[_Mapped]:
    """Return the file mappings without private pages, sorted by address."""
    out: list[_Mapped] = []
    candidate = None
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as f:
            for line in f:
                if line.startswith("Anonymous:"):
                    if candidate is not None and int(line.split()[1]) == 0:
                        out.append(candidate)
                elif line[0] in "0123456789abcdef":
                    fields = line.rstrip("\n").split(maxsplit=5)
                    start, _, end = fields[0].partition("-")
                    candidate = None
                    if len(fields) == 6 and fields[5].startswith("/"):
                        candidate = _Mapped(int(start, 16), int(end, 16), int(fields[2], 16), int(fields[4]), fields[5])
    except (OSError, ValueError, IndexError):  # the kernel does not give these fields
        return []
    return out


def _open(path: str, inode: int) -> int:
    """Open a mapped file. Return -1 if the path now belongs to another file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        return -1
    return fd
