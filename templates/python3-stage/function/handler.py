"""The stage's handler: load and place, which need not be there, and infer."""
from __future__ import annotations

import stagecoach as sc


@sc.each
def infer(state: sc.Model, call: sc.Call) -> sc.Output:
    """Answer one call. Its items come from the client, or from the stages before this one in the pipeline."""
    return sc.Output(*(reply(item) for item in call.items))


def reply(item: sc.Item) -> str:
    """Answer one item. An sc.BadInput, as of text() for tensors, is the client's error (400); any other is a 500."""
    return f"You said: {item.text()}\n"
