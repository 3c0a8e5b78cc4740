"""A stand-in of a device, in host memory, whose copies are done as late as they may be."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Stream:
    """Does what it is told when somebody waits for it, in that order."""

    def __init__(self) -> None:
        self.work: list[tuple[Any, Any]] = []
        self.lock = threading.Lock()


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.mark = stream, len(stream.work)

    def synchronize(self) -> None:
        with self.stream.lock:
            for i, job in enumerate(self.stream.work[: self.mark]):
                if job is not None:
                    job[0].copy_(job[1])
                    self.stream.work[i] = None


class StandIn:
    """A device that is in host memory. What has no place yet is full of a pattern."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.contexts = self.copies = self.allocated = 0
        self.pinned_now: list[Any] = []
        self.warmed: set[Any] = set()
        self.fail_at = -1  # the copy that fails

    def context(self) -> None:
        self.contexts += 1

    def warm(self, dtypes: set[Any]) -> None:
        self.warmed |= dtypes

    def memory(self) -> tuple[int, int]:
        return self.room, 1 << 30

    def pinned(self, size: int) -> Any:
        b = torch.full((size,), 0xEE, dtype=torch.uint8)
        self.pinned_now.append(b)
        return b

    def unpin(self, buffers: Any) -> None:
        for b in buffers:
            self.pinned_now = [p for p in self.pinned_now if p is not b]

    def allocate(self, size: int) -> Any:
        if size > self.room:
            raise RuntimeError("CUDA out of memory. Tried to allocate 9.00 GiB")
        self.allocated += 1
        return torch.full((size,), 0xDD, dtype=torch.uint8)

    def now(self) -> Event:
        return Event(Stream())

    def stream(self) -> Stream:
        return Stream()

    def follow(self, stream: Stream, event: Event) -> None:
        event.synchronize()

    def copy(self, stream: Stream, to: Any, buffer: Any) -> Event:
        self.copies += 1
        if self.copies == self.fail_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        with stream.lock:
            stream.work.append((to, buffer))
        return Event(stream)
