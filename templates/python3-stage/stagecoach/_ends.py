"""The ends of a batch's calls: what infer returned or raised, made into outputs and errors, and into frames."""

from __future__ import annotations

from types import GeneratorType
from typing import Any, Callable, Iterable

from . import _conn, _wire, device
from ._types import BadInput, Call, Cancelled, Expired, OutOfMemory, Output, out_of_memory, text_of

MAX_MESSAGE = 64 << 10  # characters of an error
_OWN = (BadInput, Cancelled, Expired, OutOfMemory)  # errors whose text says all

Infer = Callable[[Any, list], Any]


def run(infer: Infer, state: Any, calls: list[Call]) -> list[Output | BaseException]:
    """Run infer; each call gets its output or error."""
    try:
        results = infer(state, calls)
        if type(results) is not list:
            results = _listed(results)
        if len(results) != len(calls):
            raise ValueError(f"infer returned {len(results)} results for {len(calls)} calls, want one a call, in order")
    except BaseException as err:  # also sys.exit: a function does not end its replica
        _told(calls[0], err)
        return device.relieved([err] * len(calls))
    for r in results:
        if type(r) is GeneratorType:
            results = _streamed(calls, results)
            break
    out: list[Output | BaseException] = []
    for call, r in zip(calls, results):
        try:
            if isinstance(r, BaseException):
                raise r
            out.append(Output.of(r))
        except BaseException as err:
            _told(call, err)
            out.append(err)
    return device.relieved(out)


def _streamed(calls: list[Call], results: list[Any]) -> list[Any]:
    """Take turns in asking the calls' generators for a piece, and send it; what they return are the results."""
    results = list(results)
    live = [i for i, r in enumerate(results) if type(r) is GeneratorType]
    while live:
        for i in tuple(live):
            generator = results[i]
            try:
                calls[i].send(next(generator))
                continue
            except StopIteration as end:
                results[i] = end.value
            except BaseException as err:
                results[i] = err
                try:
                    generator.close()
                except BaseException as late:
                    _told(calls[i], late)
            live.remove(i)
    return results


def _told(call: Call, err: BaseException) -> None:
    """Log an error that is not the call's own, and let go of what its frames have: inputs, tensors on the device."""
    if not isinstance(err, _OWN):
        call.log.error("the function raised", exc_info=(type(err), err, err.__traceback__))
    err.__traceback__ = None


def _listed(results: Any) -> list[Any]:
    """Make a list of what infer returned: any iterable, but none that is a single result by mistake."""
    if isinstance(results, (str, bytes, bytearray, dict, Output)) or not isinstance(results, Iterable):
        raise TypeError(
            f"infer returned {type(results).__name__}, want one result per call, in a list or another iterable"
        )
    return list(results)


def _code(err: BaseException) -> int:
    if isinstance(err, BadInput):
        return _wire.BAD_INPUT
    if isinstance(err, Cancelled):
        return _wire.CANCELED
    if isinstance(err, Expired):
        return _wire.EXPIRED
    return _wire.OUT_OF_MEMORY if device.name() != "cpu" and out_of_memory(err) else _wire.FAILED


def encoded(index: int, service: int, r: Output | BaseException) -> tuple[int, bytes, list[int]]:
    """Encode the end of a call: frame type, payload, and the files that ride along."""
    if isinstance(r, BaseException):
        text = text_of(r)
        if not isinstance(r, _OWN):
            text = f"{type(r).__name__}: {text}" if text else type(r).__name__
        return _wire.ERROR, _wire.error(index, service, _code(r), (text or type(r).__name__)[:MAX_MESSAGE]), []
    try:
        items, files = _conn.attach(r.items)
        try:
            payload = _wire.result(index, service, r.header, items)
            if len(payload) > _wire.MAX_FRAME:
                raise ValueError(f"{len(payload)} bytes in small items, want at most {_wire.MAX_FRAME}")
        except BaseException:
            _conn.close_all(files)
            raise
        return _wire.RESULT, payload, files
    except Exception as err:
        return encoded(index, service, RuntimeError(f"output: {err}"))
