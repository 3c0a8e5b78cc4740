"""The way of parameters onto a device: through a ring of pinned buffers.

What is to be on the device is one flat allocation there, cut into pieces. Some threads, lanes, take a piece each,
read what belongs into it from host memory or from the mapped file into one of their two pinned buffers, and have that
copied on a stream of their own while they fill the other. Neither the reading nor the copying holds the interpreter's
lock.

A byte is read once by a processor and once by the device. A page of a mapped file that this process has not touched
yet would cost a fault each few pages on top; so what is mapped and unchanged is read from its file, which is in
memory, in place of through the mapping.
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

ALIGN = 256  # bytes; where tensors begin on the device
PIECE = 8 << 20  # bytes of a buffer: they are on their way for 0.2 ms, of which Python takes a tenth
BUFFERS = 2  # of a lane: one is filled while the other is copied
LANES = 12  # at most: a processor copies 4 to 10 GB/s from the page cache, the bus takes some 50

MADV_DONTFORK, MADV_HUGEPAGE = 10, 14
_READ = 1 << 20  # bytes from which on a file is read rather than its mapping


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the device is there."""


class Backend(Protocol):
    """What the ring needs of a device. Buffers and allocations are tensors of uint8."""

    def pinned(self, size: int) -> Any:
        """A buffer in host memory that the device copies from by itself."""

    def unpin(self, buffers: Sequence[Any]) -> None:
        """Give buffers back that the device is through with."""

    def allocate(self, size: int) -> Any:
        """Memory on the device, for what the calling thread's stream does from now on."""

    def now(self) -> Event:
        """When what the calling thread's stream has been told so far is done."""

    def stream(self) -> Any:
        """A new stream."""

    def follow(self, stream: Any, event: Event) -> None:
        """Have the calling thread use the stream, and what that is told from now on come after the event."""

    def copy(self, stream: Any, to: Any, buffer: Any) -> Event:
        """Have a buffer copied on the thread's stream, without waiting; the event is when that is done."""


class Source(NamedTuple):
    """Bytes that go to the device."""

    at: int  # in the flat allocation
    size: int
    address: int  # in host memory
    file: int = -1  # a descriptor that has the same bytes, if there is one
    offset: int = 0  # where they begin in it


class _Slot:
    """A buffer, and when its last copy is done."""

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
        """Put the bytes from begin to end of the flat allocation here; the sources are those that lie there."""
        for s in sources:
            low, high = max(begin, s.at), min(end, s.at + s.size)
            if s.file < 0:
                if low < high:
                    ctypes.memmove(self.address + low - begin, s.address + low - s.at, high - low)  # without the lock
                continue
            while low < high:
                n = os.preadv(s.file, [self.view[low - begin : high - begin]], s.offset + low - s.at)
                if n == 0:
                    raise OSError(f"the model's file has become shorter: {high - low} bytes are missing in it")
                low += n


class _Lane:
    """One thread's stream and its buffers, which outlive the thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.stream = backend.stream()
        self.slots: list[_Slot] = []

    def slot(self, turn: int, size: int) -> _Slot:
        """The buffer for a turn, of at least so many bytes. It is made when it is first needed: all of it is pinned, so a
        small state has small buffers, and a lane with one piece has one."""
        i = turn % BUFFERS
        if i == len(self.slots):
            self.slots.append(_Slot(self._backend.pinned(size)))
        elif self.slots[i].buffer.numel() < size:
            old, self.slots[i] = self.slots[i], _Slot(self._backend.pinned(size))
            old.wait()
            self._backend.unpin([old.buffer])
        return self.slots[i]


class Ring:
    """The lanes. One caller at a time."""

    def __init__(self, backend: Backend, lanes: int = 0, piece: int = PIECE) -> None:
        """lanes 0: as many as there are processors, up to :data:`LANES`; piece is in bytes."""
        self._backend = backend
        self._piece = piece
        self._lanes: list[_Lane | None] = [None] * (lanes or min(LANES, len(os.sched_getaffinity(0))))

    def prepare(self) -> None:
        """Have all buffers there ahead of need."""
        self._each(len(self._lanes), lambda lane: [lane.slot(i, self._piece) for i in range(BUFFERS)])

    def copy(self, sources: Sequence[Source], flat: Any, meanwhile: Callable[[], None] | None = None) -> float:
        """Copy sources, sorted by their place, into the flat allocation, and return how many seconds that took.
        meanwhile is run beside it. When it returns, also by an error, nobody reads the sources or writes the
        allocation any more."""
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
        """Run work in n lanes at a time, and meanwhile beside them; raises what one of them raised when all have
        ended."""
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
            if t.ident is not None:  # else there was no thread to be had
                t.join()
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Give the buffers back."""
        lanes, self._lanes = [lane for lane in self._lanes if lane is not None], [None] * len(self._lanes)
        slots = [slot for lane in lanes for slot in lane.slots]
        for slot in slots:
            slot.wait()
        self._backend.unpin([slot.buffer for slot in slots])


class Cuda:
    """The backend of CUDA, by PyTorch."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = device
        self._registered: set[int] = set()  # addresses of buffers that are not PyTorch's own

    def pinned(self, size: int) -> Any:
        # Huge pages are pinned in a fraction of the time, and unlike PyTorch's own buffers these can be given back.
        # A child must not have them: a page that is pinned here and copied there would be neither's.
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without
            memory.madvise(MADV_HUGEPAGE)
        buffer = self._torch.frombuffer(memory, dtype=self._torch.uint8)
        ctypes.memset(buffer.data_ptr(), 0, size)  # without the lock, and PyTorch's threads
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
        self._torch.cuda.set_stream(stream)  # of this thread
        stream.wait_event(event)

    def copy(self, stream: Any, to: Any, buffer: Any) -> Event:
        to.copy_(buffer, non_blocking=True)
        event = self._torch.cuda.Event(blocking=True)  # one that is waited for without a processor
        event.record(stream)
        return event


def opened(sources: Sequence[Source]) -> tuple[list[Source], list[int]]:
    """Find the files that sources are mapped from, and have these read from there. Returns the sources, and the
    files' descriptors, to be closed. What has been written to since it was mapped, and files that are not there any
    more, stay as they are."""
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


def remember() -> None:
    """Find once, in a zygote, what is mapped from files and unchanged, for the children that run none of the author's
    code before their parameters are on the device. That takes a walk through all page tables."""
    global _remembered
    _remembered = _unchanged()


def forget() -> None:
    """Have the next call of :func:`opened` look again: parameters may be written to from now on."""
    global _remembered
    _remembered = None


class _Mapped(NamedTuple):
    start: int
    end: int
    offset: int  # in the file
    inode: int
    path: str


_remembered: list[_Mapped] | None = None


def _unchanged() -> list[_Mapped]:
    """The mappings of files none of whose pages is this process's own, by address."""
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
    except (OSError, ValueError, IndexError):  # a kernel that tells less
        return []
    return out


def _open(path: str, inode: int) -> int:
    """Open a file that is mapped; -1 when the one of that path is another one by now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        return -1
    return fd
