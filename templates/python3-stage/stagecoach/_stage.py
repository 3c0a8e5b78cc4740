"""Imports the handler's module, runs load and place, and turns their errors into messages for the
author."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import time
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, NoReturn

from . import _ring, device
from ._model import Model
from ._types import Replica, StageError, out_of_memory, refuse_async

HANDLER = "handler"  # the module's name


@dataclass
class Hooks:
    """The handler's hooks and limits."""

    infer: Callable[[Any, list], Any]
    load: Callable[[Model], Any] | None = None
    place: Callable[[Any, Replica], Any] | None = None
    max_batch: int = 1  # calls per batch
    slots: int = 1  # batches that run at a time


@dataclass
class Loaded:
    """A handler whose load hook has run. All replicas share it."""

    hooks: Hooks
    model: Model
    state: Any  # the result of load, or the model
    nanos: int  # time of importing the handler and loading, in ns


def load() -> Loaded:
    """Import the handler and run its load hook. An error is raised as a :class:`StageError`; its
    traceback is printed to stderr."""
    begin = time.monotonic_ns()
    hooks = _hooks(_handler())
    logs()
    model = Model.from_environment()
    state = model
    if hooks.load is not None:
        try:
            state = hooks.load(model)
        except (Exception, SystemExit) as err:
            _fail("load", err)
        if sys.getrefcount(model) <= 2:  # only this function refers to it
            model.release()
    return Loaded(hooks, model, state, time.monotonic_ns() - begin)


def logs() -> None:
    """Set up logging, unless the handler has done so."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    log = logging.getLogger("stagecoach")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def place(loaded: Loaded, replica: Replica) -> Any:
    """Run the place hook, or else move PyTorch's objects to the replica's device. Return the state
    for infer."""
    try:
        if loaded.hooks.place is not None:
            _ring.forget_mappings()
            return loaded.hooks.place(loaded.state, replica)
        return replica.to_device(loaded.state)
    except (Exception, SystemExit) as err:
        there = device.name() != "cpu" and out_of_memory(err)
        if there and device.OUT_OF_MEMORY_ON not in str(err):  # adds the device, for the platform
            err = device.memory_error(err).with_traceback(err.__traceback__)
        _fail("place", err)


def _handler() -> ModuleType:
    try:
        return importlib.import_module(HANDLER)
    except ModuleNotFoundError as err:
        if err.name == HANDLER:
            raise StageError(f"no {HANDLER}.py in {os.getcwd()}, want one with a function infer") from err
        traceback.print_exc()
        raise StageError(missing(str(err.name), "the handler")) from err
    except SyntaxError as err:
        raise StageError(f"{err.filename}, line {err.lineno}: {err.msg}") from err
    except (Exception, SystemExit) as err:
        _fail("import of the handler", err)


def missing(module: str, who: str) -> str:
    """Return the error text for a module that the interpreter lacks, with the remedy."""
    version = ".".join(map(str, sys.version_info[:3]))
    top = module.partition(".")[0]
    package = {"PIL": "pil", "cv2": "opencv", "sklearn": "sklearn", "yaml": "yaml"}.get(
        top, top.replace("_", "-").lower()
    )
    return (
        f"{who} needs the module {module!r}, which {sys.executable} (Python {version}) does not have: put it into "
        f"requirements.txt and build again, or install it on the machine (apt-get install python3-{package}), or name "
        "another interpreter in the function's fprocess (/opt/venv/bin/python ./stage)"
    )


def _hooks(module: ModuleType) -> Hooks:
    def hook(name: str, arguments: int) -> Callable[..., Any] | None:
        f = getattr(module, name, None)
        if f is None:
            return None
        if not callable(f):
            raise StageError(f"{HANDLER}.{name} is {type(f).__name__}, want a function")
        refuse_async(f"{HANDLER}.{name}", f)
        try:
            inspect.signature(f).bind(*[None] * arguments)
        except TypeError as err:
            raise StageError(f"{HANDLER}.{name}{inspect.signature(f)}: {err}, want it to take {arguments}") from err
        except ValueError:  # a function in C may have no signature
            pass
        return f

    def number(name: str) -> int:
        n = getattr(module, name, 1)
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 10_000:
            raise StageError(f"{HANDLER}.{name} = {n!r}, want a number from 1 to 10000")
        return n

    infer = hook("infer", 2)
    if infer is None:
        raise StageError(f"{module.__file__} has no function infer, want infer(state, calls)")
    return Hooks(infer, hook("load", 1), hook("place", 2), number("MAX_BATCH"), number("SLOTS"))


def _fail(what: str, err: BaseException) -> NoReturn:
    """Raise a StageError with the name of the hook and the handler's innermost line. Print the
    traceback to stderr."""
    if isinstance(err, StageError):
        raise err
    traceback.print_exception(type(err), err, err.__traceback__)
    if isinstance(err, ModuleNotFoundError):
        raise StageError(f"{what}: {missing(str(err.name), 'it')}") from err
    ours = os.path.dirname(os.path.abspath(__file__))
    at = ""
    for frame in traceback.extract_tb(err.__traceback__):
        if frame.filename.startswith(os.getcwd()) and not os.path.abspath(frame.filename).startswith(ours):
            at = f" (at {os.path.relpath(frame.filename)}:{frame.lineno})"
    text = str(err)
    raise StageError(f"{what}: {type(err).__name__}{': ' + text if text else ''}{at}") from err
