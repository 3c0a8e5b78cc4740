"""Turns what infer returned or raised into the outputs and errors of a batch's calls, and into
frames."""

from __future__ import annotations

from types import GeneratorType
from typing import Any, Callable, Iterable

from . import _conn, _wire, device
from ._types import BadInput, Call, Cancelled, Expired, OutOfMemory, Output, may_run_again, out_of_memory, text_of

MAX_MESSAGE = 64 << 10  # characters per error
_OWN = (BadInput, Cancelled, Expired, OutOfMemory)  # errors whose text needs no class name

Infer = Callable[[Any, list], Any]


def run(infer: Infer, state: Any, calls: list[Call]) -> list[Output | BaseException]:
    """Run infer. Each call gets its output or error."""
    results = _results(infer, state, calls)
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
            _log_error(call, err)
            out.append(err)
    return device.with_sizes(out)


def _results(infer: Infer, state: Any, calls: list[Call]) -> list[Any]:
    """Return what infer returned for each call. If it raises, each half of the batch runs on its
    own, and so on. So one bad call among n costs at most 2·log2(n) further runs, rounded up. If a
    call may not run twice, each call gets the error."""
    try:
        results = infer(state, calls)
        if type(results) is not list:
            results = _listed(results)
        if len(results) != len(calls):
            raise ValueError(f"infer returned {len(results)} results for {len(calls)} calls, want one per call, in order")
        return results
    except BaseException as err:  # also sys.exit, because a function must not end its replica
        if len(calls) == 1 or any(call._streamed for call in calls) or not may_run_again():
            _log_error(calls[0], err)
            return [err] * len(calls)
        err.__traceback__ = None  # releases the objects in its frames
    half = len(calls) // 2
    return _results(infer, state, calls[:half]) + _results(infer, state, calls[half:])


def _streamed(calls: list[Call], results: list[Any]) -> list[Any]:
    """Take one piece from each call's generator in turn, and send it. The results are the return
    values of the generators."""
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
                    _log_error(calls[i], late)
            live.remove(i)
    return results


def _log_error(call: Call, err: BaseException) -> None:
    """Log an error that the handler did not raise on purpose. Release the objects in its frames,
    such as inputs and tensors on the device."""
    if not isinstance(err, _OWN):
        call.log.error("the function raised", exc_info=(type(err), err, err.__traceback__))
    err.__traceback__ = None


def _listed(results: Any) -> list[Any]:
    """Return the results of infer as a list. infer may return any iterable, except one that is
    probably a single result."""
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
    """Encode the end of a call: frame type, payload, and the files that are sent with it."""
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
