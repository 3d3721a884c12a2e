"""A run as a script's own loop sees it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.attached.evaluation import evaluate
from paceline.attached.first_batch import FirstBatch, FirstTurn
from paceline.attached.functions import Functions, ShownBatch, cut, refuse_recording
from paceline.attached.gather import SumsOfRows
from paceline.attached.given import Given
from paceline.attached.logged import Logged
from paceline.attached.session import ScriptProcess
from paceline.attached.turn import Loss, Turn
from paceline.base.errors import CallbackError, JobError, PlanRefused, TrainingError
from paceline.base.nested import tensors_in
from paceline.base.streams import drawing, kept_streams, seed_streams
from paceline.checkpoint.values import can_pack
from paceline.job import Job
from paceline.job.callback import Callback
from paceline.job.order import Order
from paceline.launch.collectives.values import value_of_one
from paceline.strategies.compose import may_be_elsewhere
from paceline.training.feed import is_stream
from paceline.training.loop import Loop
from paceline.training.prefetch import Fed


def attach(
    model: Any,
    optimizer: Any,
    loader: Any,
    *,
    schedule: Any = None,
    clip: Any = None,
    state: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int | None = None,
) -> AttachedRun:
    """Let this script's loop run on every rank of a plan.

    Args:
        model: The module that the loop trains, or several by name.
        optimizer: Built from the model's parameters; several by name beside several models. It stays
            this object: its groups get the parameters that this rank holds.
        loader: A `DataLoader`. Its batch size is the global one; its order becomes that of the seed,
            each sample once an epoch.
        schedule: A learning-rate scheduler of the optimizer; it is stepped with each update.
        clip: Greatest global norm of the gradients of an update.
        state: Objects with `state_dict` and `load_state_dict`, or mappings of plain values, by name.
            Checkpoints keep what changes of them on rank 0.
        callbacks: See docs/callbacks.md.
        seed: Of the order of data and of the streams of random numbers in the loop; by default that
            of `torch.manual_seed`.

    Raises:
        JobError: something can't be mapped to ranks. The message says what.
    """
    given = Given(model, optimizer, schedule)
    session = ScriptProcess.current()
    if session.run is not None:
        raise JobError(
            "pl.attach is called a second time: a script is one run",
            hint="several models and optimizers of one loop go into one pl.attach, by name",
        )
    run = AttachedRun(
        session,
        given,
        loader,
        clip=clip,
        state=state or {},
        callbacks=callbacks,
        seed=torch.initial_seed() if seed is None else seed,
    )
    frame = inspect.currentframe()
    if frame is not None and frame.f_back is not None:
        run.variables = {**frame.f_back.f_globals, **frame.f_back.f_locals}
    session.run = run
    return run


class AttachedRun:
    """A run whose loop is the script's: `for epoch in run.epochs(10): for batch in run: ...`.

    Attributes:
        epoch: The number of the epoch, from 0.
        rank: The number of this process.
        world_size: How many there are.
        device: Where this rank computes.
        is_main: Whether this rank is the one that prints.
    """

    def __init__(
        self,
        session: ScriptProcess,
        given: Given,
        loader: Any,
        *,
        clip: Any,
        state: Mapping[str, Any],
        callbacks: Sequence[Callback],
        seed: int,
    ) -> None:
        self.session, self.given, self.loader = session, given, loader
        self.clip, self.callbacks = clip, callbacks
        self.state = {name: _kept_as(name, each) for name, each in state.items()}
        self.variables: Mapping[str, Any] = {}  # of the script, where it attached
        self.device, self.epoch = session.context.device, 0
        self.rank, self.world_size = session.context.rank, session.context.world_size
        self.is_main = not self.rank and session.look is None
        self.loop: Loop | None = None
        self.first: FirstBatch | None = None  # in place of the loop, until the model is laid out
        self.functions = Functions()
        self.turn: Turn | FirstTurn | None = None
        self.order: Order | None = None  # None for a stream
        self._num_items = 0  # of the data set of which the order is
        self.summary: dict[str, Any] | None = None  # once the run has ended
        self._sums: SumsOfRows | None = None
        self._held: Fed | None = None  # the first batch of the epoch that is next, of a stream
        self._is_open = False  # whether batches may be taken
        self._alike = 0, -1  # the step of the last block of `alike`, and its number there
        with torch.no_grad():
            for module in given.models.values():
                if not may_be_elsewhere(session.plan, module):
                    module.to(self.device)
            if self.world_size > 1:  # scripts may draw other weights on each rank
                seed = value_of_one(seed, 0, device=self.device)
                modules = nn.ModuleList(given.models.values())
                tensors = [*modules.parameters(), *modules.buffers()]
                _give_values_of_first_rank(tensors, self.device)
        self.seed = seed & (2**63 - 1)

    # --- The loop ---------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of `count`, from 0. Collective."""
        self._begin(epochs=count)
        while self._is_going and self.step != self._here.run.job.total_steps:
            epoch = self._next_epoch()
            if epoch is None:
                break
            self.epoch, self._is_open = epoch, True
            yield epoch
            self._end_turn()
            self._is_open = False
            if self._is_going and self._next_epoch() == epoch:
                raise TrainingError(
                    f"the loop leaves epoch {epoch} before its end, after step {self.step}",
                    hint="`for batch in run` takes all batches of the epoch; run.steps(N) takes as "
                    "many as you want",
                )
        self.finish()

    def steps(self, count: int) -> Iterator[Any]:
        """Yield this rank's rows of each batch until `count` steps are taken, over as many epochs as it takes."""
        self._begin(steps=count)
        while self._is_going and (fed := self._fetch()) is not None:
            self.epoch = fed.window.epoch
            yield self._open(fed)
            self._end_turn()
        self.finish()

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's rows of each batch of the epoch, as the loader yields batches."""
        if not self._has_begun or not self._is_open:
            raise TrainingError(
                "`for batch in run` is outside of the run's epochs",
                hint="for epoch in run.epochs(10): for batch in run: ..., or for batch in run.steps(2000)",
            )
        self._end_turn()
        if self._is_going and self._next_epoch() != self.epoch:
            raise TrainingError(
                f"`for batch in run` comes a second time in epoch {self.epoch}, whose batches are all taken",
                hint="each pass over the data is an epoch of run.epochs(N): give N as many as there are "
                "passes. run.evaluate(function, loader) goes through data without training",
            )
        renews_workers = self.loader.num_workers and not self.loader.persistent_workers
        if renews_workers and self.loop is not None:
            self.loop.read_anew()  # as the loader does for each of its iterators
        while self._is_going and self._next_epoch() == self.epoch:
            fed = self._fetch()
            assert fed is not None
            yield self._open(fed)
            self._end_turn()
        if self._here.is_left:
            self.finish()  # which raises

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return len(self.loader)

    def _begin(self, **length: int) -> None:
        """Begin the run. Collective."""
        if self._has_begun:
            raise TrainingError(
                "run.epochs and run.steps give the length of the whole run, once",
                hint="one run.epochs(N) or run.steps(N) in a script; each pl.attach is a run",
            )
        self._refuse_scaler()
        session = self.session
        job = session.change(
            self.given.job(
                self.loader,
                clip=self.clip,
                seed=self.seed,
                callbacks=self.callbacks,
                precision=session.precision,
                parts=[Logged],
                state=self.state,
                **length,
            )
        )
        session.check(job)
        if not is_stream(job.data):
            self.order, self._num_items = Order.of(job), len(job.data)
        if session.plan.splits_model or session.look is not None:
            self.first = FirstBatch(session, job, self.given)
            session.enter()
        else:
            self._build(job)

    def _build(self, job: Job) -> None:
        """Build what ranks hold, and go on from where the run is. Collective."""
        session = self.session
        loop = self.loop = Loop(session.context, job, session.plan, session.settings_of(job))
        session.stack.callback(loop.run.log.close)
        self.given.adopt(loop.run.stepper)
        self._sums = SumsOfRows(loop.run.mesh.replicas)
        self.logged = next(part for part in loop.run.parts if isinstance(part, Logged))
        if self.first is not None:
            loop.run.stepper.job_state = self.first.job_state
            (module,) = self.given.models.values()
            self.functions.answer_calls(module, loop.run.stepper)
        else:
            session.enter()
        if loop.run.run_dir is not None and (names := self._unkept()):
            loop.run.log.display.say(
                f"checkpoints don't keep {', '.join(names)}: a resumed run has them as the script makes "
                "them anew; state= names what is to be kept"
            )
        self.variables = {}  # the script may delete some of them to free memory
        loop.restore()
        if loop.run.is_copied:
            loop.run.settle()

    def _lay_out(self, first: FirstBatch, loss: Loss, batch: Any) -> None:
        """Build what ranks hold of the model, as the function of its loss uses it, and begin the run with the first
        batch's turn. Collective.

        Raises:
            PlanRefused: the loss is no function, or the plan can't run it.
        """
        first.refuse_tensor(loss)
        assert first.run.job.collate is not None  # a script's job has one
        called, shown = self.functions.called(loss), ShownBatch(first.run.job.collate)
        assert isinstance(self.turn, FirstTurn)
        given, rows = self.turn.batch if batch is None else batch, max(self.turn.rows, 1)
        if batch is not None:
            cut(batch, self.turn.pieces)  # refuses one with other rows
        self._refuse_other_shapes(given)
        with shown.showing(given, rows, called):
            first.begins(
                partial(self._build, self.functions.recorded(first.run.job, called, shown))
            )
        self.first = None
        fed = self._fetch()
        assert fed is not None
        self._open(fed)

    def _refuse_other_shapes(self, batch: Any) -> None:
        """Refuse a first batch whose rows have other shapes than rank 0's, of which replicas would lay out other parts.
        Collective.

        Raises:
            PlanRefused: they have.
        """
        shapes = [list(tensor.shape[1:]) for tensor in tensors_in(batch)]
        if self.world_size > 1 and value_of_one(shapes, 0, device=self.device) != shapes:
            raise PlanRefused(
                f"plan '{self.session.plan}' lays the model out by the first batch, and rows of this rank have the "
                f"shapes {shapes}, which are not those of rank 0",
                hint="pad all samples to one length, or take a plan without replicas",
            )

    @property
    def _here(self) -> Loop | FirstBatch:
        here = self.first or self.loop
        assert here is not None
        return here

    @property
    def _has_begun(self) -> bool:
        return self.loop is not None or self.first is not None

    @property
    def _is_going(self) -> bool:
        return self._here.run.ended is None and not self._here.is_left

    def _next_epoch(self) -> int | None:
        """Return the epoch of the next step; None if there is none."""
        if self.order is not None:
            return self.order.window(self.step).epoch
        if self._held is None:
            self._held = self._here.fetch()
        return None if self._held is None else self._held.window.epoch

    def _fetch(self) -> Fed | None:
        loop = self._here
        if self.order is not None:
            step, data = loop.run.step, loop.run.job.data
            epoch = self.order.window(step).epoch
            if step == self.order.windows.first_step(epoch) and len(data) != self._num_items:
                raise TrainingError(
                    f"the data set has {len(data)} items at the beginning of epoch {epoch}, and had "
                    f"{self._num_items} when the run began: an order of all epochs is fixed by then",
                    hint="keep its length, and change what it holds between epochs; or make it an "
                    "IterableDataset, which is read anew in each epoch",
                )
        fed, self._held = self._held, None
        return loop.fetch() if fed is None else fed

    def _open(self, fed: Fed) -> Any:
        if self.first is not None:
            self.turn = self.first.turn(fed)
        else:
            assert self.loop is not None
            self.turn = Turn(self.loop, fed, reads_ahead=self._reads_ahead(fed))
        return self.turn.batch

    def _reads_ahead(self, fed: Fed) -> bool:
        # Between epochs a script may change what its data set holds.
        next_epoch = None if self.order is None else self.order.window(self.step + 1).epoch
        return next_epoch == fed.window.epoch

    def _end_turn(self) -> None:
        """Count the step of the batch that the loop is done with. Collective."""
        turn, self.turn = self.turn, None
        if turn is not None:
            with self._saving_before():
                turn.end()

    def finish(self) -> None:
        """End the run here: evaluate, save and sum up. Collective. Called when the epochs or steps are
        over, and at the script's end.

        Raises:
            Preempted: the run was asked to stop before its last step, and is saved.
        """
        if not self._has_begun or self.summary is not None:
            return
        self._end_turn()
        if self.loop is None:
            raise TrainingError(
                f"the run ends after step {self.step}, and nothing was trained",
                hint="a run that is complete needs no plan that splits the model: resume it under data=N",
            )
        self._is_open = False
        with self._saving_before():
            self.summary = self.loop.finish()
        self.session.finished(self.summary)

    # --- Verbs ------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """This is the number of rows of the batch that count on this rank; 0 for one that stands in for missing rows.

        Inside a loss that is a function of a batch: of that batch.
        """
        refuse_recording("run.rows")
        return self._turn("run.rows").rows

    @property
    def step(self) -> int:
        """This is the number of steps that are counted."""
        return self._here.run.step if self._has_begun else 0

    def backward(self, loss: Loss | Callable[[Any], Loss], *more: Any) -> torch.Tensor:
        """Compute the gradients of a loss, over all ranks. Collective.

        Args:
            loss: The loss of this rank's rows: a scalar, their mean, or (sum, count), which is
                normalised once by the count of all ranks. Or a function of a batch that returns it:
                plans may then call it on parts of the batch, or split the model.
            more: For a function first what it is called with, which the loop has made of this rank's rows; by default
                the loader's batch. Then names of the models that get gradients; all by default.

        Returns:
            The mean loss over all ranks, the same on each. It is known after `run.update()`, and NaN before.

        Raises:
            PlanRefused: the plan needs a function, or can't run this one.
        """
        batch = None
        if more and not isinstance(more[0], str):
            batch, *more = more  # type: ignore[assignment]
            if not callable(loss):
                raise TrainingError(
                    "run.backward is given a loss that is computed, and a batch to compute it of",
                    hint="run.backward(function, batch) calls function(batch)",
                )
        turn = self._turn("run.backward")
        if self.session.look is not None:
            self.session.look(self, loss, batch)
        if self.first is not None:
            self._lay_out(self.first, loss, batch)
            turn = self._turn("run.backward")
        assert isinstance(turn, Turn)
        if not turn.is_whole and callable(loss):
            loss = self.functions.called(loss, turn.state.model)
        return turn.backward(loss, more or tuple(turn.state.parts), batch)

    def update(self, optimizer: str = "") -> None:
        """Clip the gradients, step the optimizer and its schedule, and drop the gradients. Collective."""
        self._turn("run.update").update(optimizer)

    def log(self, **figures: Any) -> None:
        """Record figures of this step in metrics.jsonl: a mean over this rank's rows, or (sum, count) each.

        They are joined over the ranks that log them, weighed by their rows.
        """
        refuse_recording("run.log")
        turn = self._turn("run.log")
        if self.session.look is None:  # otherwise nobody reads them
            if isinstance(turn, FirstTurn):
                raise TrainingError(
                    "run.log is called before the first run.backward(function), where nothing is trained yet",
                    hint="call it after run.backward(function) or run.update(), or take a data=N or shard=N plan",
                )
            self.logged.add(figures, rows=turn.rows, whole=turn.fed.window.count)

    def gather(self, value: Any) -> Any:
        """Return the rows of all ranks, in the order of the batch of all ranks, with gradients. Collective.

        Args:
            value: A tensor with one row for each of this rank's rows of the batch, or tuples, lists or
                mappings of such tensors.
        """
        refuse_recording("run.gather")
        turn, sums = self._turn("run.gather"), self._sums
        if self.session.look is not None:
            self.session.look(self, "run.gather", None)
        if isinstance(turn, FirstTurn):
            raise PlanRefused(
                f"plan '{self.session.plan}' splits the model over ranks, and run.gather is called before the "
                "loss that it is laid out for",
                hint="data=N and shard=N plans gather rows",
            )
        assert sums is not None
        return turn.gather(value, sums)

    def evaluate(self, function: Callable[[Any], Any], data: Any) -> Any:
        """Return what a function measures of all samples, each of them once over all ranks. Collective.

        The models are in evaluation mode meanwhile, without gradients.

        Args:
            function: Is given a batch, as a loader yields it. It returns a mean over the batch's rows,
                (sum, count), or a mapping of names to these.
            data: A `DataLoader` without a sampler of its own, or a data set.
        """
        if self.session.look is not None:
            self.session.look(self, "run.evaluate", None)
        if self.loop is None:
            raise TrainingError(
                "run.evaluate is called before the run has begun",
                hint="call it inside of `for epoch in run.epochs(N)`, or after"
                + (
                    "; under a plan that splits the model, after the first run.backward(function)"
                    if self.session.plan.splits_model
                    else ""
                ),
            )
        if self.session.plan.splits_model:
            function = self.functions.called(function, self.loop.run.stepper.model)
        turn, self.turn = self.turn, None  # its rows are not those of the function
        try:
            measured = evaluate(self.loop, function, data)
        finally:
            self.turn = turn
        if self.turn is None and self.summary is None and self.step:
            with self._saving_before():
                self.loop.run.settle()  # a callback may want this step's checkpoint
        return measured

    def stop(self) -> None:
        """End the run as done, on all ranks after the same step: this one before `run.update()`, otherwise the next.

        Any rank may ask for it.
        """
        if self.session.look is not None:
            return
        if self.loop is None:
            raise TrainingError(
                "run.stop is called before the run has begun to train",
                hint="call it in the loop; under a plan that splits the model, after run.backward(function)",
            )
        self.loop.run.wants_end = True

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Draw the same random numbers on all ranks inside the block: for a rollout, or a permutation."""
        step, number = self._alike
        self._alike = self.step, number + 1 if step == self.step else 0
        with kept_streams(), drawing():
            seed_streams(self.seed, "alike", *self._alike)
            yield

    def _turn(self, verb: str) -> Turn | FirstTurn:
        if self.turn is None:
            raise TrainingError(
                f"{verb} is called where the run has handed out no batch",
                hint="for batch in run: ... run.backward(loss); run.update()",
            )
        return self.turn

    def _refuse_scaler(self) -> None:
        """Refuse a scaler of losses, whose scale no update would take out of the gradients.

        Raises:
            JobError: the script has one.
        """
        for name, value in self.variables.items():
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                raise JobError(
                    f"the script scales its losses by '{name}', a GradScaler: run.update() would step with "
                    "scaled gradients",
                    hint="torch.autocast in bfloat16 needs no scaler; precision='fp16' of a pl.Job scales losses",
                )

    def _unkept(self) -> list[str]:
        """Return the names of the script's objects that have state, and of which nobody keeps it."""
        kept = {id(module) for model in self.given.models.values() for module in model.modules()}
        kept |= {id(each.optimizer) for each in self.given.optimizers.values()}
        kept |= {
            id(each.holder if isinstance(each, _Contents) else each) for each in self.state.values()
        }
        kept |= {id(each) for each in (*self.given.schedules.values(), self)}
        return sorted(
            name
            for name, value in self.variables.items()
            if id(value) not in kept
            and not isinstance(value, type)
            and (
                isinstance(value, torch.Generator)
                or all(
                    callable(getattr(value, method, None))
                    for method in ("state_dict", "load_state_dict")
                )
            )
        )

    # --- Around a step ----------------------------------------------------------------------------------------------

    @contextmanager
    def _saving_before(self) -> Iterator[None]:
        """Save what would be lost with an error of a callback."""
        try:
            yield
        except CallbackError as error:
            assert self.loop is not None
            self.loop.saves.save_before(error)
            raise


def _give_values_of_first_rank(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Give tensors the values that they have on rank 0. Collective.

    Those that are not on the device travel through one tensor there, for each type: the group may
    hold on to a tensor after it was sent.
    """
    elsewhere = [tensor for tensor in tensors if tensor.device.type != device.type]
    sizes = {t.dtype: max(e.numel() for e in elsewhere if e.dtype == t.dtype) for t in elsewhere}
    rooms = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    for tensor in tensors:
        if tensor.device.type == device.type:
            dist.broadcast(tensor, 0)
            continue
        on_device = rooms[tensor.dtype][: tensor.numel()].view(tensor.shape)
        on_device.copy_(tensor)
        dist.broadcast(on_device, 0)
        tensor.copy_(on_device)


def _kept_as(name: str, value: Any) -> Any:
    """Return a script's object in a form whose state a checkpoint keeps.

    Raises:
        JobError: it has no state_dict, or one of other values than plain ones and tensors.
    """
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, dict | list | torch.Tensor) and can_pack(value):
        return _Contents(value)
    if not all(
        callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
    ):
        raise JobError(
            f"state '{name}' is of {type(value).__name__}, without state_dict and load_state_dict",
            hint="give it these two methods, or give a dict or a list of plain values and tensors",
        )
    if not can_pack(value.state_dict()):
        raise JobError(
            f"the state_dict of state '{name}' ({type(value).__name__}) has values that a checkpoint "
            "can't hold",
            hint="numbers, texts, tensors, and lists and mappings of them",
        )
    return value


class _Contents:
    """The contents of a dict, a list or a tensor as a state."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def state_dict(self) -> dict[str, Any]:
        return {"contents": self.holder}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        holder, contents = self.holder, state["contents"]
        if isinstance(holder, torch.Tensor):
            with torch.no_grad():
                holder.copy_(contents)
        elif isinstance(holder, dict):
            contents = dict(contents)  # it may be the holder
            holder.clear()
            holder.update(contents)
        else:
            holder[:] = list(contents)
