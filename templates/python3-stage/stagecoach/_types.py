"""The types that hooks see. Nothing here does I/O; what a call does beyond its data, its ``_Link`` does."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy
    import torch

BINARY = "application/octet-stream"
JSON = "application/json"
TEXT = "text/plain"


class BadInput(Exception):
    """An error that the call's input caused: the client gets 400 instead of 500, and nothing is retried."""


class Cancelled(Exception):
    """The call was cancelled: nobody waits for its result any more."""


class Expired(Exception):
    """The call's deadline has passed, or it ran for longer than the environment's exec_timeout."""


class OutOfMemory(Exception):
    """The replica's device has not the memory that the call takes: it is tried again by a replica on other devices, and
    this replica is replaced by one elsewhere. Raised by the place hook, the function is not started on this device
    again for a while. What PyTorch raises when a device is out of memory counts as this. Without a device it is an
    error like any other: no replica would have more memory."""


class StageError(Exception):
    """Why a stage cannot start, for people: which thing, what was got, what to do."""


class Key(NamedTuple):
    """Which attempt of which task of which request a call is."""

    request: str
    task: int
    attempt: int  # from 1


class Tensor(NamedTuple):
    """A named array as it travels: Open Inference Protocol v2."""

    name: str
    datatype: str  # BOOL, UINT8 ... UINT64, INT8 ... INT64, FP16, BF16, FP32, FP64 or BYTES
    shape: tuple[int, ...]
    data: Any  # bytes-like; elements row by row, little-endian; of BYTES each with its length as 4 bytes in front


class Item:
    """One element of what a call receives or answers: a set of named tensors, or else bytes with a content type.

    ``body`` and ``content_type`` are of an item of bytes, ``tensors``, ``torch`` and ``datatype`` of one of tensors.
    Asking a received item for the kind that it is not raises :class:`BadInput`: the client gets 400 with a text that
    says so.
    """

    __slots__ = ("content_type", "_body", "_wire", "_arrays")

    def __init__(
        self, body: bytes | str = b"", content_type: str = "", tensors: Mapping[str, Any] | None = None
    ) -> None:
        """Make an item to answer: of a body, or of tensors by name, each a numpy array or a torch tensor."""
        self._wire: list[Tensor] | None = None
        self._arrays: dict[str, numpy.ndarray] | None = None
        if tensors is not None:
            from ._tensors import encode  # numpy is imported when there are tensors

            self._wire = [encode(str(name), value) for name, value in tensors.items()]
            self._body, self.content_type = b"", ""
        elif isinstance(body, str):
            self._body, self.content_type = _utf8(body), content_type or TEXT
        else:
            self._body = body if type(body) is bytes else bytes(memoryview(body))
            self.content_type = content_type or BINARY

    @classmethod
    def received(cls, body: bytes, content_type: str, wire: list[Tensor] | None) -> Item:
        """Make an item of what came over the wire, which is looked at when it is asked for."""
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
        """The tensors by name, without a copy where numpy has the datatype. BF16 comes as its bits (uint16), see
        :meth:`torch`; BYTES as an array of bytes objects."""
        if self._arrays is None:
            from ._tensors import to_numpy

            self._arrays = {t.name: to_numpy(t) for t in self._wired()}
        return self._arrays

    def datatype(self, name: str) -> str:
        """The datatype of a tensor: FP32, INT64, ..."""
        return self._named(name).datatype

    def torch(self, name: str) -> torch.Tensor:
        """A tensor for PyTorch, without a copy."""
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
    """Encode text. What came as other bytes, in a header field for instance, goes out as it came."""
    return text.encode("utf-8", "surrogateescape")


class Part(NamedTuple):
    """The share of a call's input that came from one predecessor in the pipeline; the client's own comes from ""."""

    source: str
    items: list[Item]


class Output:
    """The good end of a call: items, and header fields for the HTTP response when this is the pipeline's last stage.

    Each item is an :class:`Item`, or what one is made of: bytes; a str (text/plain); a dict of numpy arrays or torch
    tensors by name, or a single one, which is named "output"; anything else that is JSON, with numpy's numbers. As a
    call's result, what one item is made of stands for an Output of that item, and None for one without items.
    """

    __slots__ = ("items", "header")

    def __init__(self, *items: Any, header: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        self.items: list[Item] = [it if type(it) is Item else item_of(it) for it in items]
        fields = header.items() if isinstance(header, Mapping) else header
        self.header: list[tuple[str, str]] = [(str(k), str(v)) for k, v in fields] if header else []

    @classmethod
    def of(cls, result: Any) -> Output:
        """Make an output of a call's result."""
        if isinstance(result, Output):
            return result
        return cls() if result is None else cls(result)


def item_of(value: Any) -> Item:
    """Make an item of what :class:`Output` takes for one."""
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
    """What an error says; its class may fail to."""
    try:
        return str(err)
    except Exception as fault:
        return f"(its text raised {type(fault).__name__})"


def out_of_memory(err: BaseException) -> bool:
    """Whether an error is of a device that has not the memory: :class:`OutOfMemory`, or what PyTorch raises."""
    if isinstance(err, OutOfMemory) or any(t.__name__ == "OutOfMemoryError" for t in type(err).__mro__):
        return True  # from PyTorch 1.13 on
    text = text_of(err)
    return isinstance(err, RuntimeError) and "CUDA" in text and ("out of memory" in text or "ALLOC_FAILED" in text)


def is_array(value: Any) -> bool:
    """Whether value is a numpy array or a torch tensor, without importing either."""
    return any(t.__module__ in ("numpy", "torch") and t.__name__ in ("ndarray", "Tensor") for t in type(value).__mro__)


def _plain(value: Any) -> Any:
    """Make a number of numpy's one of Python's, for JSON."""
    if any(t.__module__ == "numpy" and t.__name__ == "generic" for t in type(value).__mro__):
        return value.item()
    if is_array(value):
        raise TypeError(f"{type(value).__name__} among JSON, whose tolist() is JSON")
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class Link(Protocol):
    """What a call needs of the replica that it runs in; package-private."""

    def send(self, call: Call, rest: memoryview) -> None:
        """Send a piece of the call's output, when the receiver has room for it; raises as :meth:`Call.check`."""

    def wait(self, call: Call, timeout: float | None) -> bool:
        """Wait until the call is over, or for so many seconds."""


class Call:
    """One call of a batch."""

    index = batch = 0  # where the call is; package-private, as all that begins with "_"
    _link: Link | None = None
    _cancelled = False
    _overtime = ""  # what to say when exec_timeout was nearer than the deadline

    def __init__(
        self,
        parts: list[Part] | Any = (),
        header: list[tuple[str, str]] | None = None,
        deadline: float | None = None,
        key: Key = Key("", 0, 1),
        traceparent: str = "",
    ) -> None:
        """Make a call, also for a handler's own tests: ``Call("text")`` has what :class:`Output` takes as its input."""
        if type(parts) is not list or parts and type(parts[0]) is not Part:
            parts = [Part("", [item_of(parts)])] if type(parts) is not tuple or parts else []
        self.parts: list[Part] = parts  # one a predecessor, sorted by its name
        self.header: list[tuple[str, str]] = header or []  # of the request
        self.deadline = self._until = (
            deadline  # seconds since 1970; None: there is none. _until: what exec_timeout makes of it
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
        """The one item of the input; :class:`BadInput` when there are several, or none."""
        items = self.items
        if len(items) != 1:
            raise BadInput(f"{len(items)} items, want one")
        return items[0]

    def header_value(self, name: str, default: str = "") -> str:
        """The first header field of that name, in any case."""
        name = name.lower()
        return next((v for k, v in self.header if k.lower() == name), default)

    @property
    def log(self) -> logging.LoggerAdapter:
        """A logger whose lines have the call's id, by which they are found together with the platform's."""
        return _CallLog(logging.getLogger("stagecoach"), {"call": self.header_value("X-Call-Id") or self.key.request})

    def remaining(self) -> float | None:
        """How many seconds there are until the call's deadline, at least 0; None: it has none."""
        return None if self._until is None else max(0.0, self._until - time.time())

    def cancelled(self) -> bool:
        """Whether the call is over: cancelled, or past its deadline. A long computation asks now and then."""
        return self._cancelled or self._until is not None and time.time() >= self._until

    def check(self) -> None:
        """Raise :class:`Cancelled` or :class:`Expired` when the call is over."""
        if self._cancelled:
            raise Cancelled("the call was cancelled")
        if self._until is not None and time.time() >= self._until:
            raise Expired(self._overtime or "the call's deadline has passed")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the call is over, or for so many seconds; returns whether it is over."""
        return self.cancelled() if self._link is None else self._link.wait(self, timeout)

    def send(self, data: bytes | str) -> None:
        """Stream a piece of the call's output ahead of its result, 64 MiB in all: with more the call fails and is
        over. It waits while the receiver is behind, and raises :class:`Cancelled` or :class:`Expired` when the call is
        over. The platform puts the pieces together: what comes next, the client or a stage, gets them at the call's
        end."""
        self.check()
        try:
            piece = memoryview(_utf8(data) if isinstance(data, str) else data).cast("B")
        except TypeError as err:
            raise TypeError(f"a piece of a stream of {type(data).__name__}, want bytes or str: {err}") from None
        if self._link is not None:
            self._link.send(self, piece)


class _CallLog(logging.LoggerAdapter):
    """Puts the call's id behind each line."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return f"{msg} call={(self.extra or {})['call']}", kwargs


@dataclass
class Replica:
    """This process: one running copy of the function."""

    name: str = ""
    function: str = ""  # name.namespace
    device: str = "cpu"  # for torch: "cpu" or "cuda:0"
    threads: int = 1  # that compute
    _place: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)

    def to_device(self, state: Any) -> Any:
        """Return state with PyTorch's modules and tensors on the device, also those in dicts, lists, tuples and
        dataclasses: what happens without a place hook, at the speed of the bus. Modules are changed in place. On the
        CPU it is the state itself."""
        return state if self._place is None else self._place(state)


def refuse_async(name: str, hook: Any) -> None:
    """Refuse a hook that nobody would wait for."""
    for f in (hook, getattr(hook, "__call__", None)):
        if inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f):
            raise StageError(f"{name} is an async def, want a plain def: SLOTS says how many run at a time, in threads")


def each(f: Callable[[Any, Call], Any]) -> Callable[[Any, list[Call]], list[Any]]:
    """Make an infer hook of a function for one call: ``@each`` above ``def infer(state, call): ...``. What it raises is
    that call's error, and a call that is over already is not begun."""
    refuse_async(getattr(f, "__name__", "each"), f)

    @functools.wraps(f)
    def infer(state: Any, calls: list[Call]) -> list[Any]:
        out: list[Any] = []
        for call in calls:
            try:
                call.check()
                out.append(f(state, call))
            except Exception as err:  # of whatever the function does
                out.append(err)
        return out

    return infer
