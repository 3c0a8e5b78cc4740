"""A stage as transformer.py beside it, whose parameters load copies into the process's memory: as most handlers do that read
a model in another way than the SDK's. Replicas that fork from it share that memory until they write to it."""
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
