"""The strategy `recompute`: activations are computed again instead of being kept."""

from paceline.strategies.costs import CostModel
from paceline.strategies.recompute.cost import enter
from paceline.strategies.recompute.keys import KEYS
from paceline.strategies.strategy import Conflict, Strategy

STRATEGY = Strategy(
    name="recompute",
    is_active=lambda plan: plan.modifiers.recompute != "none",
    keys=KEYS,
    conflicts=(
        Conflict(
            "compile=blocks with recompute=selective",
            "what a compiled block keeps for its backward is chosen when it is compiled, by torch.compile",
            "recompute=full, or recompute=selective without compile=blocks",
            lambda plan: (
                plan.modifiers.compile == "blocks" and plan.modifiers.recompute == "selective"
            ),
        ),
    ),
    code=lambda plan: (plan.modifiers.recompute,),
    cost=CostModel(enter),
    run="paceline.strategies.recompute.run",
    runs_forward_again=lambda plan: plan.modifiers.recompute == "full" and not plan.splits_model,
)
