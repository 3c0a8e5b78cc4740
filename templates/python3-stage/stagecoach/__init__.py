"""What a Python stage of a Stagecoach pipeline imports: the types of its hooks, and the process around them.

A stage is a module ``handler`` (handler.py) with up to three hooks::

    import stagecoach as sc

    MAX_BATCH = 8                                   # calls that infer takes at a time; default 1
    SLOTS = 1                                       # batches at a time, each in a thread; max_inflight overrides it

    def load(model: sc.Model) -> State: ...         # optional; once, before replicas fork: parameters into host memory
    def place(state: State, replica: sc.Replica): ...  # optional; in each replica: parameters onto its device
    def infer(state, calls: list[sc.Call]): ...     # one result per call, in order

Threads of Python take turns: more ``SLOTS`` than one help hooks that wait, a larger ``MAX_BATCH`` those that compute.

``load`` runs in a process with one thread, which replicas are forked from: no threads, no device there. Without
``load`` the state is the :class:`Model`; without ``place`` PyTorch's modules and tensors go to the replica's device and
all else stays as it is.

A call's result is what :class:`Output` takes, an exception (that call's error), or a generator, whose pieces are
streamed (:meth:`Call.send`) and whose return value is the output. What ``infer`` raises is every call's error.
:func:`each` makes ``infer`` of a function for one call. Errors: :class:`BadInput` is the client's (400),
:class:`Cancelled` and :class:`Expired` say that the call was over before, :class:`OutOfMemory` has it tried elsewhere,
every other one is a 500.

``print`` and :mod:`logging` go where the platform takes logs. PyTorch records no gradients in ``infer``, unless that
asks for it (``torch.enable_grad()``).
"""

from __future__ import annotations

from ._main import main
from ._model import Model
from ._types import BadInput, Call, Cancelled, Expired, Item, Key, OutOfMemory, Output, Part, Replica, StageError, each

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
]
