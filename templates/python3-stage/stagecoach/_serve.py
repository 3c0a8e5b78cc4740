"""A replica's side of the stage protocol: it says hello, then answers batches until it is drained, told to end, or alone."""
from __future__ import annotations

import socket
from typing import Any

from ._stage import Hooks
from ._types import Replica


def serve(sock: socket.socket, hooks: Hooks, state: Any, replica: Replica, load: int, place: int) -> None:
    """Answer batches with ``hooks.infer(state, calls)`` over sock, which it closes. load and place are how many ns these
    have taken. It returns when the dispatcher has drained the replica or is gone, or after SIGTERM when what was taken is
    answered; a dispatcher that breaks the protocol is a :class:`WireError`. To be called in the main thread, which runs
    infer when there is one slot."""
    raise NotImplementedError
