"""What compiled blocks are priced at, on two equal blocks, another one and a root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from jobs.compiled import Recurrent
from torch import nn
from torch.utils.data import TensorDataset

from paceline.base.errors import PlanError
from paceline.cluster.devices import Device
from paceline.cluster.software import PACELINE
from paceline.job import Job
from paceline.model.cost.profile import Affine, Fused, Parameter, Profile, Segment, Work
from paceline.model.cost.trace import profile_job
from paceline.planner.corrections import Calibration, Corrections
from paceline.planner.estimate import Estimate
from paceline.planner.program import start_s, starts_late
from paceline.planner.rank_kinds import MemoryNeed
from paceline.planner.search import RankedPlans, compiling, search
from paceline.planner.space import compiled_variant
from paceline.strategies.compile.cost import FIRST_S, KERNEL_S, narrow
from paceline.strategies.limits import DeviceCounts, Limits
from paceline.strategies.plan import Plan

COMPILED = Plan.parse("single compile=blocks")


def segment(unit: str, operators: int) -> Segment:
    """Fusing leaves half of its operators as kernels."""
    work = Work(
        flops=Affine(0, 10),
        moved_bytes=Affine(4, 2),
        function_bytes=Affine(0, 6),
        operators=operators,
        fused=Fused(Affine(1, 4), spared_operators=operators / 2, kernels=operators / 2),
    )
    return Segment(unit, work, replace(work, operators=2 * operators))


PROFILE = Profile(
    parameters=tuple(Parameter(name, name, 4, rows=1) for name in ("a", "b", "c")),
    segments=(segment("a", 10), segment("b", 10), segment("c", 20), segment("", 5)),
)


def test_blocks_that_are_alike_are_compiled_once():
    """Five kernels forward and five backward of two blocks, ten and ten of another one; the root's are none."""
    assert start_s(PROFILE, COMPILED) == pytest.approx(FIRST_S + KERNEL_S * (5 + 5 + 10 + 10))
    assert start_s(PROFILE, Plan()) == 0.0


def test_arithmetic_takes_as_long_and_less_is_moved():
    """In blocks; what lies between them stays. What functions hand each other is plain traffic, too."""
    first, *_, root = narrow(PROFILE, COMPILED, PACELINE).segments
    assert first.forward.flops == Affine(0, 10) and first.forward.function_bytes == Affine(0, 6)
    assert first.forward.moved_bytes == Affine(3, -2) and first.forward.operators == 5
    assert root == PROFILE.segments[-1]
    assert narrow(replace(PROFILE, segments=(first,)), COMPILED, PACELINE).segments == (first,)


def test_all_of_a_compiled_block_is_recomputed():
    """Autograd keeps its tensors at its end, and so a second forward can't end before."""
    parts = tuple(replace(each, again=Work(flops=Affine(0, 4))) for each in PROFILE.segments)

    first, *_, root = narrow(replace(PROFILE, segments=parts), COMPILED, PACELINE).segments

    assert first.again is None and root.again is not None


def test_a_compiled_block_keeps_a_tensor_of_each_operator_at_most():
    """Five operators are left of ten. Hooks of kept tensors take time where it is recomputed."""
    kept = tuple(
        replace(each, kept_tensors=count)
        for each, count in zip(PROFILE.segments, (3, 8, 8, 8), strict=True)
    )

    narrowed = narrow(replace(PROFILE, segments=kept), COMPILED, PACELINE).segments

    assert [segment.kept_tensors for segment in narrowed] == [3, 5, 8, 8]


def test_blocks_that_torch_does_not_take_stay_as_they_are():
    """They cost what they cost without compiling, and no time at the start; a model of such blocks alone is refused.
    Pieces of a model that is split are compiled, as a recurrent layer is one operator in their graphs."""
    recurrent = replace(PROFILE, recurrent=("c",))

    assert [
        before == after
        for before, after in zip(
            PROFILE.segments, narrow(recurrent, COMPILED, PACELINE).segments, strict=True
        )
    ] == [False, False, True, True]
    assert start_s(recurrent, COMPILED) == pytest.approx(FIRST_S + KERNEL_S * (5 + 5))
    alone = replace(PROFILE, recurrent=("a", "b", "c"))
    with pytest.raises(PlanError, match=r"no nn\.RNN"):
        narrow(alone, COMPILED, PACELINE)
    stages = Plan.parse("pipeline=2 microbatches=2 compile=blocks")
    assert narrow(alone, stages, PACELINE).segments == narrow(PROFILE, stages, PACELINE).segments


@pytest.mark.parametrize(
    ("model", "recurrent"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 6), Recurrent(nn.GRU(6, 6))), ("1",)),
        (lambda: Recurrent(nn.LSTM(6, 6)), ("",)),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.RNNCell(6, 6)), ()),
    ],
)
def test_a_profile_names_blocks_that_torch_does_not_take(
    model: Callable[[], nn.Module], recurrent: tuple[str, ...]
):
    x = torch.zeros(4, 6)
    profile = profile_job(
        Job(
            model=model,
            data=TensorDataset(x, x),
            loss=F.mse_loss,
            batch=2,
            steps=1,
            optimizer=lambda named: torch.optim.SGD(named),
        )
    )
    assert profile.recurrent == recurrent


def price(plan: Plan) -> Estimate:
    """A second a step, half of it where blocks are compiled, after 40 seconds."""
    compiles = plan.modifiers.compile == "blocks"
    step_s = (0.5 if compiles else 1.0) * (1.0 if plan.world_size == 1 else 1.5)
    need = MemoryNeed("each rank", Device("cpu", 0, 100), {"parameters": 10})
    return Estimate(
        step_s,
        10,
        need.ledger,
        {"compute": step_s},
        needs=(need,),
        low_s=step_s / 1.01,
        high_s=1.01 * step_s,
        start_s=40.0 if compiles else 0.0,
    )


@pytest.mark.parametrize(
    ("steps", "chosen"), [(None, "single"), (50, "single"), (90, "single compile=blocks")]
)
def test_compiling_is_proposed_for_long_runs_alone(steps: int | None, chosen: str):
    """Half a second of each step makes up for 40 after 80 steps."""
    ranked_plans = search(
        price, Limits(8, compiled_steps=steps), DeviceCounts(2, 2, may_be_fewer=True)
    )
    assert ranked_plans.chosen is not None and str(ranked_plans.chosen.plan) == chosen
    proposed = [
        candidate for candidate in ranked_plans.ranked if candidate.plan.modifiers.compile != "none"
    ]
    assert bool(proposed) == (chosen != "single")
    assert all(candidate.plan.relaxed is None for candidate in proposed)


def test_what_does_not_compose_is_not_proposed():
    assert compiled_variant(Plan.parse("tensor=2")) is None
    assert compiled_variant(Plan.parse("data=2")) == Plan.parse("data=2 compile=blocks")


def test_a_calibration_says_how_late_a_plan_starts():
    """Ranks of other plans start, too."""
    known = Corrections()
    known.add(Plan(), price(Plan()), Calibration(1.1, 10, start_s=3.0))
    assert known.apply(COMPILED, price(COMPILED)).start_s == 40.0
    known.add(COMPILED, price(COMPILED), Calibration(0.6, 10, start_s=22.0))
    assert known.apply(COMPILED, price(COMPILED)).start_s == 22.0
    assert known.apply(Plan(), price(Plan())).start_s == 0.0


def test_the_planner_says_where_compiling_does_not_pay():
    """A gain of 2 % by its price may be none; one of a half pays after 80 steps, and what was measured goes first."""

    def hardly(plan: Plan) -> Estimate:
        estimate = price(plan)
        return (
            replace(estimate, step_s=0.98 * price(Plan()).step_s) if estimate.start_s else estimate
        )

    def ranked_plans(price: Callable[[Plan], Estimate]) -> RankedPlans:
        return search(price, Limits(8, compiled_steps=10_000), DeviceCounts(1, 1))

    assert "does not pay here" in compiling(ranked_plans(hardly))
    assert ranked_plans(hardly).chosen.plan == Plan()
    text = "pays from 80 steps on: it takes 40 s once and gains 500 ms a step, as predicted"
    assert text in compiling(ranked_plans(price))
    tried = [
        replace(each, estimate=replace(each.estimate, step_s=1.1, is_measured=True))
        if each.plan == COMPILED
        else each
        for each in ranked_plans(price).ranked
    ]
    text = compiling(replace(ranked_plans(price), ranked=tried))
    assert "does not pay here" in text and text.endswith("gains -100 ms a step, as tried")
    assert compiling(search(price, Limits(8), DeviceCounts(1, 1))) == ""


def test_only_compiling_starts_late():
    assert starts_late(COMPILED) and not starts_late(Plan.parse("data=2 recompute=full"))


def test_compiled_code_says_nothing_of_other_code():
    """A plan whose blocks are compiled runs other code than the plan without."""
    known = Corrections()
    known.add(COMPILED, price(COMPILED), Calibration(0.6, 10))
    assert known.knows_kind_of(COMPILED) and not known.knows_kind_of(Plan())
