"""Callbacks of Transformers' Trainer that the tests train with."""

from __future__ import annotations

from typing import Any

import transformers


class Notes(transformers.TrainerCallback):
    """Notes what happens, asks to evaluate and save, and ends the training."""

    def __init__(self, last: int = 7) -> None:
        self.last, self.seen = last, list[tuple[str, int]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(("step", state.global_step))
        control.should_evaluate |= state.global_step == 3
        control.should_save |= state.global_step == 3
        control.should_training_stop |= state.global_step == self.last

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.seen.append(("evaluate", state.global_step))
        total = sum(p.detach().double().sum() for p in model.parameters())
        self.seen.append(("weights", round(float(total) * 1e4)))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(("end", state.global_step))


class Asks(transformers.TrainerCallback):
    """Asks for one thing after a step."""

    def __init__(self, attribute: str, step: int) -> None:
        self.attribute, self.step = attribute, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            setattr(control, self.attribute, True)
