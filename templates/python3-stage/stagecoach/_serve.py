"""A replica's side of the stage protocol: it sends Hello, then answers batches until it is drained,
is told to end, or loses its dispatcher.

Threads:

- the main thread runs infer, as it has run load and place, so that objects that belong to a thread
  stay there
- a reader handles the dispatcher's frames
- a finisher waits for the end (a Drain or SIGTERM), and then for the answers of all accepted calls
- with more than one slot, further workers start on demand
"""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any, Callable

from . import _conn, _ends, _threads, _wire, device
from ._stage import Hooks
from ._types import Call, Cancelled, Output, Replica, StageError
from ._wire import WireError

WELCOME_TIMEOUT = 30.0  # seconds
MAX_CHUNK = 64 << 10  # bytes of a stream per frame
LOST = "the replica was told to end"

_DRAIN, _END = b"\0", b"\xff"  # messages to the finisher; other bytes are numbers of signals
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Orders:
    """Tells a stage to end that shares a process, and so cannot get signals."""

    def __init__(self) -> None:
        self.theirs, self.ours = socket.socketpair()
        self.theirs.settimeout(None)  # overrides a default that the handler may have set
        self.ours.setblocking(False)

    def send(self, what: bytes) -> None:
        """Send a signal's number."""
        try:
            self.ours.send(what)
        except OSError:  # the socket is full of such messages, or closed
            pass

    def close(self) -> None:
        """Close the connection: no order can follow."""
        self.theirs.close()
        self.ours.close()


def serve(
    sock: socket.socket,
    hooks: Hooks,
    state: Any,
    replica: Replica,
    load: int = 0,
    place: int = 0,
    timeout: float = 0,
    orders: Orders | None = None,
) -> None:
    """Answer batches with ``hooks.infer(state, calls)`` over ``sock``, and close it at the end.

    ``load`` and ``place`` are how long these hooks took, in ns. ``timeout`` bounds each call in
    seconds, in addition to its deadline; 0 means no bound. The function returns when the dispatcher
    has drained the replica or has gone. It also returns when it was told to end and all accepted
    calls are answered. It raises :class:`WireError` if the dispatcher breaks the protocol.

    Without ``orders``, SIGTERM and SIGINT tell the replica to end, so the function must run in the
    main thread. With ``orders``, it sets no signal handlers, and ``orders.send`` tells the replica
    to end.
    """
    hello = _wire.hello(
        os.getpid(), replica.function, replica.name, hooks.slots, hooks.max_batch, replica.threads, load, place
    )
    server = _Server(_conn.Conn(sock), hooks, state, replica.threads, timeout)
    try:
        if orders is None:
            server.serve_signalled(hello)
        else:
            server.serve(hello, orders)
    finally:
        server.conn.close()


class _Server:
    """The replica. It is also the :class:`Link` of its calls."""

    def __init__(self, conn: _conn.Conn, hooks: Hooks, state: Any, threads: int, timeout: float) -> None:
        self.conn = conn
        self.hooks = hooks
        self.infer = hooks.infer
        self.state = state
        self.timeout = timeout
        self.log = logging.getLogger("stagecoach")
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()  # at most one batch per slot
        self.workers: list[threading.Thread] = []  # in addition to the main thread

        self.lock = threading.Lock()  # of the following fields
        self.change = threading.Condition(self.lock)
        self.batches: dict[int, list[Call]] = {}  # calls that are not yet answered, by batch
        self.running = 0  # batches whose last answer has not been sent
        self.credit = 0  # bytes of chunks that the dispatcher accepts
        self.threads = threads  # number of threads that compute
        self.greeted = False
        self.leaving = False  # no new batch starts
        self.finished = False  # all accepted calls are answered
        self.closed = False  # the connection has ended
        # Why the reader has ended; None: the other side has closed.
        self.fault: Exception | None = None

    def serve_signalled(self, hello: bytes) -> None:
        """Send Hello and answer batches, with the signals' handlers set."""
        orders = Orders()  # wakes the finisher

        def handler(number: int, _: Any) -> None:
            orders.send(bytes((number,)))  # if the handler has replaced the descriptor for wake-ups

        old = {s: signal.signal(s, handler) for s in _SIGNALS}
        fd = signal.set_wakeup_fd(orders.ours.fileno(), warn_on_full_buffer=False)
        try:
            self.serve(hello, orders)
        finally:
            signal.set_wakeup_fd(fd)
            for s, h in old.items():
                signal.signal(s, h)
            orders.close()

    def serve(self, hello: bytes, orders: Orders) -> None:
        """Send Hello and answer batches."""
        self.orders = orders
        finisher = self._thread(self._finish, (orders.theirs,), "stagecoach-finish")
        finisher.start()
        try:
            if self._greet(hello):
                self._answer_all()
        finally:
            orders.send(_END)
            finisher.join()
        if self.fault is not None and not self.finished:
            raise self.fault

    def _thread(self, target: Callable[..., None], args: tuple, name: str) -> threading.Thread:
        """Return a thread that belongs to the same stage as the calling thread."""
        run = contextvars.copy_context().run
        return threading.Thread(target=run, args=(target, *args), name=name, daemon=True)

    def _greet(self, hello: bytes) -> bool:
        """Send Hello and wait for Welcome. Return False if the replica was told to end
        meanwhile."""
        self.conn.timeout(WELCOME_TIMEOUT)
        try:
            self.conn.write(_wire.HELLO, 0, hello)
            frame = self.conn.read()
            with self.lock:
                if self.leaving:
                    return False
            if frame is None:
                raise WireError("welcome: the dispatcher has closed")
            _conn.close_all(frame.files)
            if frame.kind != _wire.WELCOME:
                raise WireError(f"frame {_wire.name_of(frame.kind)}, want Welcome")
            version, credit = _wire.decode_welcome(frame.payload)
            if not _wire.OLDEST_VERSION <= version <= _wire.VERSION:
                raise WireError(
                    f"welcome to version {version} of the stage protocol, want {_wire.OLDEST_VERSION} to "
                    f"{_wire.VERSION}"
                )
        except socket.timeout as err:
            raise WireError(f"welcome: none within {WELCOME_TIMEOUT:g} s") from err
        except OSError as err:
            if self.leaving:
                return False
            raise WireError(f"welcome: {err}") from err
        self.conn.timeout(None)
        with self.lock:
            self.credit += credit
            self.greeted = True
            return not self.leaving

    def _answer_all(self) -> None:
        reader = self._thread(self._read_all, (), "stagecoach-read")
        threads = self.threads  # before the reader gets a Threads frame
        reader.start()
        self._work(threads)
        reader.join()
        for worker in self.workers:
            worker.join()

    def _finish(self, wake: socket.socket) -> None:
        """Wait until the replica should leave, and until all accepted calls are answered. Then end
        the reader, which has received cancels and credits until then."""
        told = 0
        while True:
            what = wake.recv(1)
            if what in (b"", _END):
                return
            if what == _DRAIN or what[0] in _SIGNALS:
                told = what[0]
                break
        with self.lock:
            self.leaving = True
            greeted = self.greeted
        if not greeted:
            self.conn.shut()
            return
        # The replica wants to leave, which the dispatcher does not know yet. If this message fails,
        # the reader reports the cause.
        if told:
            try:
                self.conn.write(_wire.CREDIT, 0, _wire.uvarint(0))
            except OSError:
                pass
        with self.change:
            while self.running and not self.closed:
                self.change.wait()
            if self.closed:
                return
            self.finished = True
        self.conn.shut_reads()

    # The reader.

    def _read_all(self) -> None:
        try:
            self._read()
        except ConnectionResetError:  # closed with unread answers
            pass
        except Exception as err:  # any error ends the replica
            self.fault = self.fault or (
                err if isinstance(err, WireError) else WireError(f"{type(err).__name__}: {err}")
            )
        self.conn.shut()  # running calls can stop, and writes fail instead of waiting
        with self.change:
            self.closed = True
            for calls in self.batches.values():
                for call in calls:
                    call._cancelled = True
            self.change.notify_all()
        for _ in range(len(self.workers) + 1):
            self.jobs.put(None)

    def _read(self) -> None:
        read = self.conn.read
        while True:
            frame = read()
            if frame is None:
                return
            kind, batch, payload, files = frame
            try:
                if kind == _wire.BATCH:
                    self._start(batch, payload, files)
                elif kind == _wire.CREDIT:
                    with self.change:
                        self.credit += _wire.decode_number("credit", payload)
                        self.change.notify_all()
                elif kind == _wire.CANCEL:
                    self._cancel(batch, _wire.decode_cancel(payload))
                elif kind == _wire.THREADS:
                    total = _wire.decode_threads(payload)
                    with self.lock:
                        self.threads = max(self.threads, total)
                elif kind == _wire.DRAIN:
                    self.orders.send(_DRAIN)
                else:
                    raise WireError(f"frame {_wire.name_of(kind)}, want Batch, Cancel, Credit, Threads or Drain")
            finally:
                if files:
                    _conn.close_all(files)
            del frame, payload  # frees their memory before the next frame comes

    def _start(self, batch: int, payload: bytes, files: list[int]) -> None:
        """Decode a batch and start it."""
        try:
            calls = _wire.decode_batch(payload, lambda *ref: _conn.detach(files, *ref))
        except WireError as err:
            raise WireError(f"batch {batch}: {err}") from None
        if len(calls) > self.hooks.max_batch:
            raise WireError(f"batch {batch} of {len(calls)} calls, want at most {self.hooks.max_batch}")
        latest = time.time() + self.timeout if self.timeout else 0.0
        for index, call in enumerate(calls):
            call.batch, call.index, call._link = batch, index, self
            if latest and (call.deadline is None or call.deadline > latest):
                call._until = latest
                call._overtime = f"it ran for longer than exec_timeout, {self.timeout:g} s"
        with self.lock:
            twice, n = batch in self.batches, len(self.batches)
            if twice or n >= self.hooks.slots:
                raise WireError(f"batch {batch} while {n} run, want at most {self.hooks.slots} and each once")
            leaving = self.leaving
            if not leaving:
                self.batches[batch] = calls
                self.running += 1
        # The batch was sent before the dispatcher knew that the replica leaves; its calls run
        # elsewhere.
        if leaving:
            for index in range(len(calls)):
                self.conn.write(_wire.ERROR, batch, _wire.error(index, 0, _wire.REPLICA_LOST, LOST))
            return
        if n > len(self.workers):  # all workers have a batch
            worker = self._thread(self._work, (0,), f"stagecoach-{n}")
            try:
                worker.start()
                self.workers.append(worker)
            except RuntimeError as err:  # no thread can be started, so the batch waits for a worker
                self.log.warning("no thread could be started; the replica continues with %d batches at a time: %s", len(self.workers) + 1, err)
        self.jobs.put((batch, calls))

    def _cancel(self, batch: int, index: int) -> None:
        with self.change:
            for call in self.batches.get(batch, ()):  # empty if the batch has just ended
                if index in (call.index, _wire.CANCEL_ALL):
                    call._cancelled = True
            self.change.notify_all()

    # The workers.

    def _work(self, threads: int) -> None:
        """Run batches until the queue ends. threads is the number of threads that this thread
        computes with; 0 means unknown."""
        get, gradients = self.jobs.get, True
        while True:
            job = get()
            if job is None:
                return
            if gradients and "torch" in sys.modules:
                sys.modules["torch"].set_grad_enabled(False)  # of this thread only
                gradients = False
            if threads != self.threads:
                threads = self.threads
                _threads.compute_with(threads)
            self._run(*job)
            job = None  # frees its inputs before the next batch comes

    def _run(self, batch: int, calls: list[Call]) -> None:
        try:
            begin = time.monotonic_ns()
            results = _ends.run(self.infer, self.state, calls)
            service = time.monotonic_ns() - begin
            with self.lock:
                # Delete the batch before its last result is sent: with that result, the dispatcher
                # counts the slot as free.
                del self.batches[batch]
            for call in calls:
                call._cancelled = True  # a call that has ended must not stream
            self._send(batch, service, results)
            lost = device.context_error(results)
            if lost:  # all later calls would fail, and quickly
                raise StageError(f"the device's context is lost: {lost}")
        except OSError as err:  # of the connection
            self.log.debug("results of batch %d not sent: %s", batch, err)
            self.conn.shut()
        # Any error, such as MemoryError, must end the wait of the callers.
        except BaseException as err:
            told = isinstance(err, StageError)
            self.fault = err if told else WireError(f"results of batch {batch}: {type(err).__name__}: {err}")
            self.conn.shut()
        with self.lock:
            self.running -= 1
            if self.leaving:
                self.change.notify_all()

    def _send(self, batch: int, service: int, results: list[Output | BaseException]) -> None:
        """Send the ends of a batch's calls. Small ones are sent together."""
        pending: list[bytes] = []
        size = 0
        for index, r in enumerate(results):
            kind, payload, files = _ends.encoded(index, service, r)
            pending.append(_conn.frame(kind, batch, payload, len(files)))
            size += len(payload)
            if files or size > _conn.COPY_LIMIT:
                # Files may be sent before their frame, because the frames before it claim none.
                try:
                    self.conn.send(b"".join(pending), files)
                finally:
                    _conn.close_all(files)
                pending, size = [], 0
        if pending:
            self.conn.send(b"".join(pending))

    def send(self, call: Call, rest: memoryview) -> None:
        """Send a piece of the call's output, as far as the dispatcher has credit for it."""
        while len(rest):
            with self.change:
                while True:
                    call.check()
                    if self.closed:
                        raise Cancelled("the dispatcher has gone")
                    if self.credit > 0:
                        break
                    self.change.wait(call.remaining())
                n = min(len(rest), MAX_CHUNK, self.credit)
                self.credit -= n
            try:
                self.conn.write(_wire.CHUNK, call.batch, _wire.chunk(call.index, rest[:n]))
            except OSError as err:
                raise Cancelled(f"the dispatcher has gone: {err}") from err
            rest = rest[n:]

    def wait(self, call: Call, timeout: float | None) -> bool:
        """Wait until the call has ended, or for ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        with self.change:
            while not call.cancelled():
                bounds = [
                    b for b in (call.remaining(), None if end is None else end - time.monotonic()) if b is not None
                ]
                if bounds and min(bounds) <= 0:
                    break
                self.change.wait(min(bounds, default=None))
            return call.cancelled()
