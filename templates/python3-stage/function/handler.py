"""The stage's handler: infer, and the optional hooks load and place."""
from __future__ import annotations

import stagecoach as sc


@sc.each
def infer(state: sc.Model, call: sc.Call) -> sc.Output:
    """Answer one call. Its items come from the client, or from earlier stages of the pipeline."""
    return sc.Output(*(reply(item) for item in call.items))


def reply(item: sc.Item) -> str:
    """Answer one item. An sc.BadInput is the client's error (400); text() raises it for tensors.
    Any other exception is a 500."""
    return f"You said: {item.text()}\n"
