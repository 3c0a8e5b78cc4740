"""The package that a Python stage of a Stagecoach pipeline imports. It has the types of the stage's
hooks, and runs the process around them.

A stage is a module ``handler`` (handler.py) with up to three hooks::

    import stagecoach as sc

    MAX_BATCH = 8                                   # calls per batch; default 1
    SLOTS = 1                                       # batches at a time, each in a thread;
                                                    # max_inflight overrides it

    def load(model: sc.Model) -> State: ...         # optional; once, before replicas fork:
                                                    # parameters into host memory
    def place(state: State, replica: sc.Replica): ...  # optional; in each replica:
                                                    # parameters onto its device
    def infer(state, calls: list[sc.Call]): ...     # one result per call, in order

Only one thread of a Python process runs Python code at a time. More than one slot helps hooks that
wait; a larger ``MAX_BATCH`` helps hooks that compute.

``load`` runs in a process with one thread, from which replicas are forked. It must not start
threads or use a device. Without ``load``, the state is the :class:`Model`. Without ``place``,
PyTorch's modules and tensors go to the replica's device, and everything else stays as it is.

A call's result is one of:

- anything that :class:`Output` accepts
- an exception, which is that call's error
- a generator: its pieces are streamed (:meth:`Call.send`), and its return value is the output

If ``infer`` raises, the exception is every call's error. :func:`each` makes ``infer`` from a
function for one call, and :func:`together` from a function for the items of all calls.

Errors:

- :class:`BadInput` is the client's error (400)
- :class:`Cancelled` and :class:`Expired` say that the call has already ended
- :class:`OutOfMemory` makes the platform try the call elsewhere
- every other error is a 500

``print`` and :mod:`logging` write to the function's logs. PyTorch records no gradients in
``infer``, unless the handler enables them (``torch.enable_grad()``).
"""

from __future__ import annotations

from ._main import main
from ._model import Model
from ._types import (
    BadInput,
    Call,
    Cancelled,
    Expired,
    Item,
    Key,
    OutOfMemory,
    Output,
    Part,
    Replica,
    StageError,
    each,
    together,
)

__all__ = [
    "BadInput",
    "Call",
    "Cancelled",
    "Expired",
    "Item",
    "Key",
    "Model",
    "OutOfMemory",
    "Output",
    "Part",
    "Replica",
    "StageError",
    "each",
    "main",
    "together",
]
