"""A plan is a value with one text form; a plan that makes no sense is refused with the way out."""

from __future__ import annotations

import json
import pickle
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import PlanError
from paceline.strategies.compress.keys import COMPRESSIONS
from paceline.strategies.conflicts import check
from paceline.strategies.key_registry import KEYS
from paceline.strategies.local.keys import OUTERS, Local
from paceline.strategies.plan import AllReduce, Axes, Modifiers, Plan, Schedule
from paceline.strategies.stages.keys import SCHEDULES

PLACES = ("auto", "parts.toml", "/a/b-c.toml")


@st.composite
def legal_plans(draw: st.DrawFn) -> Plan:
    axes = Axes(
        pipeline=draw(st.integers(1, 4)),
        data=draw(st.integers(1, 6)),
        shard=draw(st.integers(1, 6)),
        tensor=draw(st.integers(1, 4)),
    )
    zero = draw(st.sampled_from([1, 2, 3])) if axes.shard > 1 else 3
    per_replica = st.tuples(*[st.integers(1, 1000)] * (axes.data * axes.shard))
    order = Schedule()
    if axes.pipeline > 1:
        name = draw(st.sampled_from(SCHEDULES))
        order = Schedule(
            schedule=name,
            virtual=draw(st.integers(2, 4)) if name == "interleaved" else 1,
        )
    elif draw(st.booleans()):
        axes, order = (
            replace(axes, parts=draw(st.integers(2, 4))),
            Schedule(place=draw(st.sampled_from(PLACES))),
        )
    modifiers = Modifiers(
        microbatches=draw(st.integers(1, 10_000) | st.just("auto")),
        recompute=draw(st.sampled_from(["none", "full"])),
        shares=draw(st.sampled_from(["equal", "speed", "memory"]) | per_replica),
        compress=draw(st.sampled_from(COMPRESSIONS if axes.data > 1 else ("none",))),
        deterministic=draw(st.sampled_from(["yes", "no"])),
    )
    sync: AllReduce | Local = AllReduce(zero)
    if axes.data > 1 and draw(st.booleans()):
        local = draw(st.integers(1, 500))
        sync = Local(local, draw(st.sampled_from(OUTERS)), draw(st.integers(1, local)))
    return Plan(axes, sync, order, modifiers)


@settings(database=None, deadline=None)
@given(legal_plans(), st.randoms(use_true_random=False), st.sampled_from([" ", ",", ", ", "\n"]))
def test_every_plan_survives_its_text(plan: Plan, order: random.Random, separator: str):
    """`Plan.parse(str(plan)) == plan`, whatever the order of the keys and what parts them."""
    assert Plan.parse(str(plan)) == plan
    words = str(plan).split()
    order.shuffle(words)
    assert Plan.parse(separator.join(words)) == plan
    assert str(Plan.parse(separator.join(words))) == str(plan)


@settings(database=None, deadline=None)
@given(legal_plans())
def test_every_plan_survives_its_values_and_pickle(plan: Plan):
    """The keys that differ from the defaults are the whole plan."""
    assert Plan.of(**plan.values()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(Plan.parse(str(plan))) == hash(plan)


@settings(database=None, deadline=None)
@given(st.text(alphabet="datshrzeoclumn=0123456789:,. ", max_size=30))
def test_any_text_is_a_plan_or_refused_with_a_message(text: str):
    """Nothing but PlanError comes out of reading a plan."""
    try:
        plan = Plan.parse(text)
    except PlanError as error:
        assert str(error)
    else:
        assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("ddp", "data=N"),
        ("dp=2", "data=N"),
        ("fsdp", "shard=N"),
        ("fsdp2=4", "shard=N"),
        ("FSDP", "shard=N"),
        ("zero3", "shard=N"),
        ("ZeRO-3", "shard=N"),
        ("zero2=4", "shard=N zero=2"),
        ("hsdp", "data=N shard=M"),
        ("deepspeed", "shard=N"),
        ("tp=2", "tensor=N"),
        ("tensor_parallel_size=2", "tensor=N"),
        ("pp=2", "pipeline=N"),
        ("mp=2", "place=N"),
        ("megatron", "tensor=N"),
        ("ps", "servers=S workers=W"),
        ("cp=2", "no plan key"),
        ("ep=2", "no plan key"),
        ("sp=2", "tensor=N"),
        ("gradient_accumulation_steps=4", "microbatches=M"),
        ("gradient_checkpointing", "recompute=full"),
        ("diloco", "local=H"),
        ("vpp=2", "schedule=interleaved"),
    ],
)
def test_words_of_other_tools(word: str, keys: str):
    """They are refused with the plan key that is meant, or with the word that there is none."""
    with pytest.raises(PlanError, match=re.escape(keys)) as caught:
        Plan.parse(word)
    assert caught.value.args[0].startswith(f"'{word.partition('=')[0]}' is no plan key: ")
    assert not re.search("did you mean", str(caught.value))


@pytest.mark.parametrize(
    "words",
    ["fsdp=2 tp=2", "ddp", "ddp=4 microbatches=2 data=2", "dta=2 tp=2", "tensor=2 date", r"ps=\d"],
)
def test_each_word_that_is_no_key_has_its_line(words: str):
    """Words that are keys have none."""
    with pytest.raises(PlanError) as caught:
        Plan.parse(words)
    unknown = [word for word in words.split() if word.partition("=")[0] not in KEYS]
    assert len(caught.value.args[0].splitlines()) == len(unknown)


@pytest.mark.parametrize(
    ("text", "canonical", "world_size"),
    [
        ("single", "single", 1),
        ("data=1", "single", 1),
        ("single microbatches=2", "single microbatches=2", 1),
        ("shard=2 data=3", "data=3 shard=2", 6),
        ("zero=3 shard=2", "shard=2", 2),
        ("zero=1,shard=2", "shard=2 zero=1", 2),
        ("data=2 shares=3:1", "data=2 shares=3:1", 2),
        ("data=2 shares=equal microbatches=1 recompute=none", "data=2", 2),
    ],
)
def test_the_text_form_is_canonical(text: str, canonical: str, world_size: int):
    """Defaults are left out, axes come outermost first."""
    plan = Plan.parse(text)
    assert str(plan) == canonical
    assert plan.world_size == plan.replicas == world_size
    assert plan.relaxed is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shrad=2", "unknown plan key 'shrad', did you mean 'shard'? Known: pipeline, place"),
        ("singel", "did you mean 'single'?"),
        (
            "nothing=2 data=2",
            "unknown plan key 'nothing', known: pipeline, place, parts, data, shard",
        ),
        ("data", "plan key 'data' needs a value"),
        ("data=", "needs a value"),
        ("data=two", "data=two is not a whole number\n\nhint: data=2"),
        ("data=-1", "data=-1 is not a whole number"),
        ("data=2.5", "data=2.5 is not a whole number"),
        ("data=0", "data=0 must be a whole number of at least 1"),
        ("data=2 data=3", "plan key 'data' is given twice: 2 and 3"),
        ("single data=2", "contradicts data=2"),
        ("single=1", "'single' takes no value, got 'single=1'"),
        ("auto=2", "'auto' takes no value"),
        ("auto", "'auto' is no plan: train finds one for it"),
        ("", "the plan is empty"),
        (" , ", "the plan is empty"),
        ("zero=2", "zero=2 splits the shard axis, and the plan has none"),
        ("data=2 zero=1", "hint: add shard=N"),
        ("shard=2 zero=4", "zero=4 must be 1, 2 or 3"),
        ("shard=2 zero=0", "zero=0 must be 1, 2 or 3"),
        ("place=auto", "place=auto needs the number of parts"),
        ("parts=2", "place=nothing"),
        ("place=parts.toml", "place=parts.toml needs the number of parts"),
        ("place=2 parts=2", "place=2 states the number of parts"),
        ("pipeline=2 place=2", "both say where"),
        ("place=1", "parts=1 and place=auto"),
        ("schedule=gpipe", "schedule=gpipe is about a pipeline, and the plan has none"),
        ("pipeline=2 accumulate=2 microbatches=2", "plan key 'microbatches' is given twice"),
        ("pipeline=2 schedule=1f1f", "did you mean '1f1b'?"),
        ("pipeline=2 microbatches=0", "microbatches=0 must be"),
        ("pipeline=2 virtual=2", "virtual=2 contradicts schedule=1f1b"),
        ("pipeline=2 virtual=0", "virtual=0 must be"),
        ("microbatches=0", "microbatches=0 must be a whole number of at least 1, or auto"),
        ("microbatches=some", "microbatches=some is not a whole number"),
        ("recompute=ful", "did you mean 'full'?"),
        ("local=2", "local=2 is about replicas, and the plan has none: add data=N"),
        ("data=2 local=0", "local=0 must be"),
        ("data=2 outer=diloco", "hint: add local=H"),
        ("data=2 fragments=2", "hint: add local=H"),
        ("data=2 local=3 outer=dilocco", "did you mean 'diloco'?"),
        ("data=2 local=3 fragments=4", "can't be more of them"),
        ("data=2 local=3 fragments=0", "fragments=0 must be"),
        ("data=2 shard=2 zero=1 local=2", "don't compose"),
        ("compress=int8", "what replicas send each other"),
        ("data=2 compress=int7", "did you mean 'int8'?"),
        ("shares=sped", "did you mean 'speed'? Known: equal, speed, memory"),
        ("shares=Equal", "did you mean 'equal'?"),
        ("data=2 shares=1:2:3", "shares=1:2:3 has 3 parts and the plan has 2 replicas"),
        (
            "servers=1 workers=2 staleness=inf shares=2:1",
            "shares=2:1 and staleness=inf: with staleness a part",
        ),
        ("data=2 shares=1:0", "shares=1:0 must be whole numbers of at least 1"),
        ("shares=1:", "is not a whole number"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(text: str, message: str):
    """The message has what was given and what is allowed, with the nearest name."""
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "words", "exact"),
    [
        ("data=2 local=1", None, "data=2 local=1"),
        ("data=2 local=8", "take 8 steps on their own samples", "data=2"),
        ("data=2 local=1 outer=diloco", "Nesterov momentum", "data=2"),
        ("data=2 compress=int8 microbatches=2", "compressed to int8", "data=2 microbatches=2"),
        (
            "data=2 local=8 outer=diloco fragments=2 compress=int8",
            "8 steps .*Nesterov.*; .*int8",
            "data=2",
        ),
    ],
)
def test_relaxed_plans_say_so(text: str, words: str | None, exact: str):
    """One local step with plain averaging is the synchronous plan; all else names what it gives up."""
    plan = Plan.parse(text)
    assert plan.relaxed is None if words is None else re.search(words, plan.relaxed or "")
    assert str(plan.exact) == exact and plan.exact.relaxed is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2 shard=2 local=2", "local=H with shard=N"),
        ("pipeline=2 data=2 local=2", "one rank alone"),
        ("data=2 local=2 compress=topk", "compress=int8 or bf16"),
        ("data=2 shard=2 compress=powersgd", "whole matrices"),
    ],
)
def test_choices_that_do_not_compose_are_refused(text: str, message: str):
    """Each with the reason and another choice."""
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(text))
    assert message in str(caught.value)


def test_everything_wrong_with_a_plan_is_said_at_once():
    """Two wrong values make one message."""
    with pytest.raises(PlanError, match=r"data=0 must be .*\nmicrobatches=0 must be"):
        Plan.parse("data=0 microbatches=0")


@pytest.mark.parametrize(
    "values",
    [
        {"data": True},
        {"data": 2.0},
        {"data": "2"},
        {"shard": 2, "zero": True},
        {"shard": 2, "zero": 2.0},
        {"data": 2, "shares": (True, 1)},
        {"dta": 2},
        {"parts": 2, "place": 3},
        {"parts": 2, "place": "two words.toml"},
    ],
)
def test_values_from_python_are_checked_too(values: dict[str, Any]):
    """A plan that could not be written down and read back can't be made."""
    with pytest.raises(PlanError):
        Plan.of(**values)


def test_a_plan_is_read_from_a_plan_a_text_or_a_file(tmp_path: Path):
    """A run's plan.json is as good as the text in it."""
    plan = Plan.parse("data=2 microbatches=auto")
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plan": str(plan), "world_size": 2}))
    assert Plan.read(plan) is plan
    assert Plan.read(str(plan)) == Plan.read(file) == Plan.read(str(file)) == plan


@pytest.mark.parametrize("given", [3, ["data=2"], {"data": 2}])
def test_what_is_no_text_is_no_plan(given: Any):
    with pytest.raises(PlanError, match="a plan is text or a Plan, got"):
        Plan.read(given)


@pytest.mark.parametrize(
    "content", [None, "", "[1]", "3", "{}", '{"plan": 3}', '{"plan": null}', "\x00", "null"]
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str | None):
    """A missing, damaged or foreign plan file gives a message with the form that is expected."""
    file = tmp_path / "plan.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PlanError, match=r"can't read a plan from .*plan\.json") as caught:
        Plan.read(file)
    assert "Errno" not in str(caught.value)


def test_a_wrong_plan_in_a_file_says_what_is_wrong(tmp_path: Path):
    """The plan's own message is kept."""
    (tmp_path / "plan.json").write_text('{"plan": "dta=2"}')
    with pytest.raises(PlanError, match="did you mean 'data'"):
        Plan.read(tmp_path / "plan.json")


def test_resolved_modifiers_replace_the_asked_ones():
    """What was "auto" gets its number, which is checked."""
    plan = Plan.parse("data=2 microbatches=auto").with_(microbatches=4, shares=(2, 1))
    assert str(plan) == "data=2 microbatches=4 shares=2:1"
    with pytest.raises(PlanError):
        plan.with_(microbatches=0)


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("single", {"data": 2}, "data=2"),
        ("data=2 shard=2", {"data": 4, "zero": 1}, "data=4 shard=2 zero=1"),
        ("data=2", {"local": 4, "outer": "diloco"}, "data=2 local=4 outer=diloco"),
        ("servers=1 workers=2", {"workers": 4, "staleness": 1}, "servers=1 workers=4 staleness=1"),
        (
            "pipeline=2 microbatches=4",
            {"schedule": "gpipe", "recompute": "full"},
            "pipeline=2 schedule=gpipe microbatches=4 recompute=full",
        ),
        (
            "data=2 recompute=full microbatches=4",
            {"recompute": "none", "microbatches": 1},
            "data=2",
        ),
    ],
)
def test_any_key_of_a_plan_can_be_replaced(text: str, values: dict[str, Any], expected: str):
    """Axes, synchronisation, schedule and modifiers alike; what is not named stays."""
    assert str(Plan.parse(text).with_(**values)) == expected


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        ("data=2", {"microbatch": 4}, "unknown plan key 'microbatch', did you mean 'microbatches'"),
        ("data=2", {"data": 0}, "data=0 must be a whole number of at least 1"),
        ("data=2 local=4", {"servers": 1, "workers": 2}, "local=4 and servers=1 don't compose"),
        ("data=2", {"virtual": 2}, "virtual=2 is about a pipeline, and the plan has none"),
        ("shard=2 zero=1", {"shard": 1}, "zero=1 splits the shard axis, and the plan has none"),
    ],
)
def test_a_replaced_key_is_checked(text: str, values: dict[str, Any], message: str):
    """A key that does not exist, or that contradicts the rest of the plan, is refused as in the text form."""
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.parse(text).with_(**values)


@pytest.mark.parametrize(
    ("pipeline", "microbatches", "text"),
    [
        (1, 1, "single"),
        (1, "auto", "single microbatches=auto"),
        (2, "auto", "pipeline=2"),
        (2, 1, "pipeline=2 microbatches=1"),
        (2, 4, "pipeline=2 microbatches=4"),
    ],
)
def test_the_default_number_of_micro_batches_depends_on_the_pipeline(
    pipeline: int, microbatches: Any, text: str
):
    """Without a pipeline a step is one micro-batch; a pipeline chooses if the plan doesn't."""
    plan = Plan(Axes(pipeline=pipeline), modifiers=Modifiers(microbatches=microbatches))
    assert str(plan) == text and Plan.parse(text) == plan
    assert Plan.parse(f"pipeline={pipeline} microbatches={microbatches}") == plan


# Plans in the words of version 0.2, and as they are written now.
EARLIER = [
    ("server=1 workers=2 staleness=inf", "servers=1 workers=2 staleness=inf"),
    ("data=2 accumulate=4 recompute=full", "data=2 microbatches=4 recompute=full"),
    ("single accumulate=auto", "single microbatches=auto"),
    ("place=auto parts=2 accumulate=2", "place=2 microbatches=2"),
    ("parts=3, place=auto", "place=3"),
]


@pytest.mark.parametrize(("text", "now"), EARLIER)
def test_earlier_names_of_keys_are_read_with_one_note(
    text: str, now: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    """A user's text gets a note with the plan to write; what a run recorded gets none."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plan": text}))
    assert str(Plan.parse(text)) == str(Plan.read(file)) == now
    assert Plan.read(now) == Plan.parse(text) and not recwarn.list

    with pytest.warns(FutureWarning, match=re.escape(f"; write '{now}'")) as noted:
        assert Plan.read(text) == Plan.parse(now)
    assert len(noted) == 1


def test_a_placement_by_file_keeps_its_words():
    """A file's name does not say how many parts it has."""
    plan = Plan.read("place=parts.toml parts=2")
    assert str(plan) == "place=parts.toml parts=2" and plan.world_size == 2


def test_a_note_is_shown_once_by_a_process():
    """However often the plan is read."""
    code = (
        "from paceline import Plan\nfor _ in range(3): Plan.read('server=1 workers=2')\n"
        "Plan.read('servers=1 workers=2')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0 and ran.stderr.count("FutureWarning") == 1


def test_values_from_python_may_have_earlier_names():
    assert Plan.of(server=1, workers=2) == Plan.parse("servers=1 workers=2")
    assert Plan.of(place="auto", parts=2).with_(accumulate=3) == Plan.of(place=2, microbatches=3)
