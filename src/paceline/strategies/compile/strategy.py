"""The strategy `compile`: torch.compile compiles repeated blocks."""

from paceline.strategies.compile.cost import narrow, start_s
from paceline.strategies.compile.keys import KEYS
from paceline.strategies.costs import CostModel
from paceline.strategies.stages.keys import splits_backward
from paceline.strategies.strategy import Conflict, Strategy
from paceline.torch_private.late_imports import OF_COMPILING

STRATEGY = Strategy(
    name="compile",
    is_active=lambda plan: plan.modifiers.compile == "blocks",
    keys=KEYS,
    conflicts=(
        Conflict(
            "compile=blocks with tensor=N",
            "split layers run programs that are recorded when the model is built, and those are not compiled yet",
            "compile=blocks with data=N, shard=N or pipeline=N, or tensor=N without it",
            lambda plan: plan.modifiers.compile == "blocks" and plan.axes.tensor > 1,
        ),
        Conflict(
            "compile=blocks with schedule=zero-bubble",
            "the backward of a compiled block is one operator, and this schedule runs each backward in two parts",
            "schedule=1f1b or interleaved",
            lambda plan: plan.modifiers.compile == "blocks" and splits_backward(plan),
        ),
    ),
    code=lambda plan: (plan.modifiers.compile,),
    cost=CostModel(narrow=narrow, start_s=start_s),
    run="paceline.strategies.compile.run",
    imports=OF_COMPILING,
)
