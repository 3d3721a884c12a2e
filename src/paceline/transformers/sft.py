"""TRL's SFTTrainer, whose training and evaluation run under a plan."""

from __future__ import annotations

import trl

from paceline.transformers.trainer import PlannedTraining


class SFTTrainer(PlannedTraining, trl.SFTTrainer):
    """`trl.SFTTrainer` under a plan; see `PlannedTraining`.

    The entropy and accuracy of tokens, which `trl.SFTTrainer` logs, stay on the ranks and are not
    logged.
    """
