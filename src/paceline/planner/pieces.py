"""A job's model in pieces, which are captured at the first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.base.errors import PlanError
from paceline.cluster.devices import Device
from paceline.job import Job
from paceline.model.cost.profile import Profile
from paceline.strategies.plan import Plan
from paceline.strategies.stages.cost import RankCost

if TYPE_CHECKING:
    from paceline.model.cost.fakes import FakeModel
    from paceline.strategies.stages.price import SplitJob


class LazyPieces:
    """The pieces of a job's model, for plans that split it.

    A capture takes seconds, and many plans need none, so it happens at the first request.

    Attributes:
        built: The job's model, if it exists already.
        problem: The reason why the model can't be cut; empty if it can, or if nobody has asked yet.
    """

    def __init__(self, job: Job, profile: Profile, built: FakeModel | None = None) -> None:
        self.job, self.profile, self.built = job, profile, built
        self._splits: dict[bool, SplitJob] = {}
        self.problem = ""
        self._layers: Profile | None = None

    def layers(self) -> Profile:
        """Return the profile of a model that is cut on described devices.

        Raises:
            PlanError: the model can't be cut.
        """
        from paceline.model.cost.blocks import NotStoodFor
        from paceline.strategies.stages.layers import layered

        split = self._captured(each=False)
        if self._layers is None:
            try:
                self._layers = layered(split)
            except NotStoodFor:
                self._leave_nothing_out()
                return self.layers()
            except Exception as error:  # a model may do anything when it runs with other samples
                raise PlanError(f"what the model's pieces cost is not known: {error}") from error
        return self._layers

    def ranks(
        self, plan: Plan, devices: Sequence[Device], *, microbatch_samples: int
    ) -> Sequence[RankCost]:
        """Return what each rank of a split model holds and does.

        Raises:
            PlanError: the model can't be cut, or not in this way.
        """
        split = self._captured()
        try:
            return split.ranks(plan, devices, microbatch_samples=microbatch_samples)
        except Exception as error:  # as above: a norm may refuse a micro-batch of one sample
            if isinstance(error, PlanError) and type(error).__name__ != "CaptureFailed":
                raise
            why = str(error).partition("\n")[0] or type(error).__name__
            raise PlanError(
                f"the model can't be cut for micro-batches of {microbatch_samples} samples: {why}"
            ) from error

    def count(self, *, each: bool = True) -> int:
        """Return the number of pieces; 0 if the model can't be cut.

        Args:
            each: Whether each block is captured, even if it equals another one.
        """
        try:
            return len(self._captured(each=each).pieces)
        except PlanError:
            return 0

    def _captured(self, *, each: bool = True) -> SplitJob:
        from paceline.model.cost.blocks import NotStoodFor
        from paceline.strategies.stages.price import SplitJob

        if each not in self._splits and not self.problem:
            try:
                self._splits[each] = SplitJob(self.job, self.profile, each=each, built=self.built)
            except NotStoodFor:
                self._leave_nothing_out()
                return self._captured(each=each)
            except Exception as error:  # a model may do anything when it is captured
                self.problem = str(error).partition("\n")[0] or type(error).__name__
        if each not in self._splits:
            raise PlanError(f"the model can't be cut: {self.problem}")
        return self._splits[each]

    def _leave_nothing_out(self) -> None:
        """Forget the chains, because the capture contradicted them although the forward had not."""
        if self.built is not None:
            self.built.chains = ()
        self._splits.pop(False, None)
