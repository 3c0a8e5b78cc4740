"""The stage of transformer.py with another load: it copies the parameters into the process's heap.

Most handlers that do not read their model with the SDK do the same. Replicas that fork from the
process share the copy until they write to it.
"""
from __future__ import annotations

import transformer
from torch import nn

import stagecoach as sc

MAX_BATCH = transformer.MAX_BATCH
infer = transformer.infer


def load(model: sc.Model) -> nn.Module:
    """Load the stage, and copy its parameters out of the mapped file."""
    stage = transformer.load(model)
    for parameter in stage.parameters():
        parameter.data = parameter.data.clone()
    return stage
