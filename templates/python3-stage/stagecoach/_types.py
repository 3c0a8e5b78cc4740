"""The types that hooks see. They do no I/O themselves; a call's ``_Link`` does."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy
    import torch

BINARY = "application/octet-stream"
JSON = "application/json"
TEXT = "text/plain"
ENV_IDEMPOTENT = "STAGECOACH_IDEMPOTENT"  # "false": no call may run twice


class BadInput(Exception):
    """The call's input has caused the error: the client gets 400 instead of 500, and nothing is
    retried."""


class Cancelled(Exception):
    """The call was cancelled, so no caller waits for its result."""


class Expired(Exception):
    """The call's deadline has passed, or it ran for longer than the environment's exec_timeout."""


class OutOfMemory(Exception):
    """The replica's device lacks memory for the call. The platform tries the call on a replica with
    other devices, and replaces this replica by another one elsewhere. If the place hook raises
    OutOfMemory, the platform does not start the function on this device for a while. PyTorch's own
    error for a full device counts as OutOfMemory. If the replica has no device, OutOfMemory is
    treated like any other error, because no other replica would have more memory."""


class StageError(Exception):
    """The reason why a stage cannot start: which thing, what was got, what to do."""


class Key(NamedTuple):
    """The request, task and attempt of a call."""

    request: str
    task: int
    attempt: int  # starts at 1


class Tensor(NamedTuple):
    """A named array in the form of the Open Inference Protocol v2."""

    name: str
    datatype: str  # BOOL, UINT8 ... UINT64, INT8 ... INT64, FP16, BF16, FP32, FP64 or BYTES
    shape: tuple[int, ...]
    # bytes-like; elements row by row, little-endian; each element of BYTES has its length as 4
    # bytes in front
    data: Any


class Item:
    """One element of a call's input or answer: a set of named tensors, or bytes with a content
    type.

    An item of bytes has ``body`` and ``content_type``; an item of tensors has ``tensors``,
    ``torch`` and ``datatype``. A received item raises :class:`BadInput` if it is asked for the
    other kind. The client then gets 400 with a text that says so.
    """

    __slots__ = ("content_type", "_body", "_wire", "_arrays")

    def __init__(
        self, body: bytes | str = b"", content_type: str = "", tensors: Mapping[str, Any] | None = None
    ) -> None:
        """Make an item to answer, from a body or from tensors by name. Each tensor is a numpy array
        or a torch tensor."""
        self._wire: list[Tensor] | None = None
        self._arrays: dict[str, numpy.ndarray] | None = None
        if tensors is not None:
            from ._tensors import encode  # import numpy only if there are tensors

            self._wire = [encode(str(name), value) for name, value in tensors.items()]
            self._body, self.content_type = b"", ""
        elif isinstance(body, str):
            self._body, self.content_type = _utf8(body), content_type or TEXT
        else:
            self._body = body if type(body) is bytes else bytes(memoryview(body))
            self.content_type = content_type or BINARY

    @classmethod
    def received(cls, body: bytes, content_type: str, wire: list[Tensor] | None) -> Item:
        """Make an item from its bytes on the wire, which are decoded on demand."""
        it = object.__new__(cls)
        it._body, it.content_type, it._wire, it._arrays = body, content_type, wire, None
        return it

    @property
    def has_tensors(self) -> bool:
        """Whether it is a set of tensors, and not bytes."""
        return self._wire is not None

    @property
    def body(self) -> bytes:
        """The bytes of an item of bytes."""
        if self._wire is not None:
            raise BadInput("got tensors, want bytes")
        return self._body

    def text(self) -> str:
        """The body as UTF-8."""
        try:
            return str(self.body, "utf-8")
        except UnicodeDecodeError as err:
            raise BadInput(f"body of content type {self.content_type!r}: {err}, want text in UTF-8") from err

    def json(self) -> Any:
        """The body as JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as err:
            raise BadInput(f"body of content type {self.content_type!r}: {err}, want JSON") from err

    @property
    def tensors(self) -> dict[str, numpy.ndarray]:
        """The tensors by name, without a copy if numpy has the datatype. BF16 comes as its bits
        (uint16); see :meth:`torch`. BYTES comes as an array of bytes objects."""
        if self._arrays is None:
            from ._tensors import to_numpy

            self._arrays = {t.name: to_numpy(t) for t in self._wired()}
        return self._arrays

    def datatype(self, name: str) -> str:
        """The datatype of a tensor: FP32, INT64, ..."""
        return self._named(name).datatype

    def torch(self, name: str) -> torch.Tensor:
        """Return a tensor for PyTorch, without a copy."""
        from ._tensors import to_torch

        return to_torch(self._named(name))

    def _wired(self) -> list[Tensor]:
        if self._wire is None:
            raise BadInput(
                f"content type {self.content_type!r}, want tensors: " '{"inputs":[{"name","datatype","shape","data"}]}'
            )
        return self._wire

    def _named(self, name: str) -> Tensor:
        for t in self._wired():
            if t.name == name:
                return t
        raise BadInput(f"no tensor {name!r} among {[t.name for t in self._wired()]}")

    def __repr__(self) -> str:
        if self._wire is not None:
            return f"Item(tensors={[f'{t.name}: {t.datatype}{list(t.shape)}' for t in self._wire]})"
        return f"Item({len(self._body)} bytes, {self.content_type!r})"


def _utf8(text: str) -> bytes:
    """Encode text. Bytes that were received as invalid UTF-8, for example in a header field, are
    sent unchanged."""
    return text.encode("utf-8", "surrogateescape")


class Part(NamedTuple):
    """The part of a call's input that one predecessor in the pipeline sent. The client's own part
    comes from ""."""

    source: str
    items: list[Item]


class Output:
    """The successful end of a call: items, and header fields for the HTTP response if this is the
    pipeline's last stage.

    Each item is an :class:`Item`, or one of these:

    - bytes
    - a str (text/plain)
    - numpy arrays or torch tensors: a dict by name, or a single one, which is named "output"
    - any other JSON, which may contain numpy's numbers

    A hook may return an item alone in place of an Output with only this item, and None in place of
    an Output without items.
    """

    __slots__ = ("items", "header")

    def __init__(self, *items: Any, header: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        self.items: list[Item] = [it if type(it) is Item else item_of(it) for it in items]
        fields = header.items() if isinstance(header, Mapping) else header
        self.header: list[tuple[str, str]] = [(str(k), str(v)) for k, v in fields] if header else []

    @classmethod
    def of(cls, result: Any) -> Output:
        """Make an output from a call's result."""
        if isinstance(result, Output):
            return result
        return cls() if result is None else cls(result)


def item_of(value: Any) -> Item:
    """Make an item from a value that :class:`Output` takes as one."""
    if isinstance(value, Item):
        return value
    if isinstance(value, str):
        return Item(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Item(bytes(value))
    if is_array(value):
        return Item(tensors={"output": value})
    if isinstance(value, Mapping) and value and all(is_array(v) for v in value.values()):
        return Item(tensors=value)
    try:
        return Item(json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain).encode(), JSON)
    except (TypeError, ValueError, RecursionError) as err:
        raise TypeError(
            f"a result of {type(value).__name__}: {err}; want bytes, str, numpy arrays or torch tensors by name, "
            "JSON, or Output(item, ...) of several of these"
        ) from err


def text_of(err: BaseException) -> str:
    """Return the text of an error. Its class may fail to make one."""
    try:
        return str(err)
    except Exception as fault:
        return f"(its text raised {type(fault).__name__})"


def out_of_memory(err: BaseException) -> bool:
    """Return whether an error means that a device lacks memory: :class:`OutOfMemory`, or PyTorch's
    own error."""
    if isinstance(err, OutOfMemory) or any(t.__name__ == "OutOfMemoryError" for t in type(err).__mro__):
        return True  # PyTorch 1.13 and later
    text = text_of(err)
    return isinstance(err, RuntimeError) and "CUDA" in text and ("out of memory" in text or "ALLOC_FAILED" in text)


def is_array(value: Any) -> bool:
    """Return whether ``value`` is a numpy array or a torch tensor, without importing either."""
    return any(t.__module__ in ("numpy", "torch") and t.__name__ in ("ndarray", "Tensor") for t in type(value).__mro__)


def _plain(value: Any) -> Any:
    """Convert a number of numpy's to one of Python's, for JSON."""
    if any(t.__module__ == "numpy" and t.__name__ == "generic" for t in type(value).__mro__):
        return value.item()
    if is_array(value):
        raise TypeError(f"{type(value).__name__} among JSON, whose tolist() is JSON")
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class Link(Protocol):
    """The operations that a call needs from its replica; package-private."""

    def send(self, call: Call, rest: memoryview) -> None:
        """Send a piece of the call's output when the receiver has room for it. Raise what
        :meth:`Call.check` raises."""

    def wait(self, call: Call, timeout: float | None) -> bool:
        """Wait until the call has ended, or for ``timeout`` seconds."""


class Call:
    """One call of a batch."""

    index = batch = 0  # position of the call; package-private, as all names that begin with "_"
    _link: Link | None = None
    _cancelled = False
    _streamed = False  # a piece of its output was sent
    _overtime = ""  # the error's text if exec_timeout ends before the deadline

    def __init__(
        self,
        parts: list[Part] | Any = (),
        header: list[tuple[str, str]] | None = None,
        deadline: float | None = None,
        key: Key = Key("", 0, 1),
        traceparent: str = "",
    ) -> None:
        """Make a call, also in a handler's own tests: ``Call("text")`` has an input that
        :class:`Output` would take."""
        if type(parts) is not list or parts and type(parts[0]) is not Part:
            parts = [Part("", [item_of(parts)])] if type(parts) is not tuple or parts else []
        self.parts: list[Part] = parts  # one per predecessor, sorted by name
        self.header: list[tuple[str, str]] = header or []  # header fields of the request
        self.deadline = self._until = (
            # The deadline in seconds since 1970, or None without a deadline. _until is the earlier
            # of the deadline and the end of exec_timeout.
            deadline
        )
        self.key = key
        self.traceparent = traceparent  # W3C trace context; "": none

    @property
    def items(self) -> list[Item]:
        """The items of all parts, in the parts' order."""
        if len(self.parts) == 1:
            return self.parts[0].items
        return [it for part in self.parts for it in part.items]

    @property
    def input(self) -> Item:
        """The only item of the input. Raises :class:`BadInput` if there are several, or none."""
        items = self.items
        if len(items) != 1:
            raise BadInput(f"{len(items)} items, want one")
        return items[0]

    def header_value(self, name: str, default: str = "") -> str:
        """Return the first header field of this name, in any case."""
        name = name.lower()
        return next((v for k, v in self.header if k.lower() == name), default)

    @property
    def log(self) -> logging.LoggerAdapter:
        """A logger whose lines have the call's id. The platform's lines about the call have the
        same id."""
        return _CallLog(logging.getLogger("stagecoach"), {"call": self.header_value("X-Call-Id") or self.key.request})

    def remaining(self) -> float | None:
        """Return the seconds until the call's deadline, at least 0, or None without a deadline."""
        return None if self._until is None else max(0.0, self._until - time.time())

    def cancelled(self) -> bool:
        """Return whether the call has ended: it was cancelled, or its deadline has passed. A long
        computation should check this now and then."""
        return self._cancelled or self._until is not None and time.time() >= self._until

    def check(self) -> None:
        """Raise :class:`Cancelled` or :class:`Expired` if the call has ended."""
        if self._cancelled:
            raise Cancelled("the call was cancelled")
        if self._until is not None and time.time() >= self._until:
            raise Expired(self._overtime or "the call's deadline has passed")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the call has ended, at most ``timeout`` seconds. Return whether it has."""
        return self.cancelled() if self._link is None else self._link.wait(self, timeout)

    def send(self, data: bytes | str) -> None:
        """Stream a piece of the call's output before its result. A call that streams more than
        64 MiB in all fails. send waits while the receiver is behind, and raises
        :class:`Cancelled` or :class:`Expired` if the call has ended. The platform joins the
        pieces. The client or the next stage gets them when the call ends."""
        self.check()
        try:
            piece = memoryview(_utf8(data) if isinstance(data, str) else data).cast("B")
        except TypeError as err:
            raise TypeError(f"a piece of a stream of {type(data).__name__}, want bytes or str: {err}") from None
        self._streamed = True
        if self._link is not None:
            self._link.send(self, piece)


class _CallLog(logging.LoggerAdapter):
    """Adds the call's id to each line."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return f"{msg} call={(self.extra or {})['call']}", kwargs


@dataclass
class Replica:
    """This process: one running copy of the function."""

    name: str = ""
    function: str = ""  # name.namespace
    device: str = "cpu"  # for torch: "cpu" or "cuda:0"
    threads: int = 1  # number of threads that compute
    _place: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)

    def to_device(self, state: Any) -> Any:
        """Return state with PyTorch's modules and tensors on the device, also those in dicts,
        lists, tuples and dataclasses. Modules are changed in place. Without a place hook, the
        platform calls this. On the CPU, the result is the state itself. The copy is as fast as
        the bus to the device."""
        return state if self._place is None else self._place(state)


def refuse_async(name: str, hook: Any) -> None:
    """Refuse an async hook, because nothing would await it."""
    for f in (hook, getattr(hook, "__call__", None)):
        if inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f):
            raise StageError(f"{name} is an async def, want a plain def: SLOTS says how many run at a time, in threads")


def each(f: Callable[[Any, Call], Any]) -> Callable[[Any, list[Call]], list[Any]]:
    """Make an infer hook from a function for one call: ``@each`` above ``def infer(state, call):
    ...``. If the function raises, the exception is that call's error. Calls that have already ended
    are skipped."""
    refuse_async(getattr(f, "__name__", "each"), f)

    @functools.wraps(f)
    def infer(state: Any, calls: list[Call]) -> list[Any]:
        out: list[Any] = []
        for call in calls:
            try:
                call.check()
                out.append(f(state, call))
            except Exception as err:  # whatever the function raises
                out.append(err)
        return out

    return infer


def together(f: Callable[[Any, list[Item]], Iterable[Any]]) -> Callable[[Any, list[Call]], list[Any]]:
    """Make an infer hook from a function for the items of all calls of a batch, which computes them
    as one tensor: ``@together`` above ``def infer(state, items): ...``. It returns one result per
    item, in order. A result is what :func:`item_of` takes, or an exception, which is the error of
    the item's call.

    If the function raises for several items, it runs again for each half of them, and so on, so
    that a bad item fails only its own call. A function that is declared not idempotent does not
    run again: then all calls fail. Calls that have already ended are skipped. The handler's
    ``MAX_BATCH`` and the annotation stagecoach.dev/batch bound the number of calls, not of items.
    """
    refuse_async(getattr(f, "__name__", "together"), f)

    def results(state: Any, items: list[Item]) -> list[Any]:
        try:
            out = list(f(state, items))
            if len(out) != len(items):
                raise ValueError(f"{len(out)} results for {len(items)} items, want one per item, in order")
            return out
        except Exception as err:  # whatever the function raises
            if len(items) == 1 or not may_run_again():
                return [err] * len(items)
        half = len(items) // 2
        return results(state, items[:half]) + results(state, items[half:])

    @functools.wraps(f)
    def infer(state: Any, calls: list[Call]) -> list[Any]:
        ends: list[Any] = []
        items: list[Item] = []
        for call in calls:
            try:
                call.check()
                ends.append(len(call.items))
                items += call.items
            except Exception as err:
                ends.append(err)
        left = iter(results(state, items) if items else ())
        return [end if isinstance(end, Exception) else _joined([next(left) for _ in range(end)]) for end in ends]

    return infer


def may_run_again() -> bool:
    """Return whether a call may run twice. The platform says so."""
    return os.environ.get(ENV_IDEMPOTENT) != "false"


def _joined(results: list[Any]) -> Any:
    """Return the output of a call from the results of its items, or its first error."""
    for i, r in enumerate(results):
        if isinstance(r, BadInput):
            return BadInput(f"item {i}: {r}")
        if isinstance(r, BaseException):
            return r
    try:
        return Output(*results)
    except Exception as err:
        return err
