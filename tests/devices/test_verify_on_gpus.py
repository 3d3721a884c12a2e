"""`verify --devices cuda:0-3` holds plans on GPUs against one GPU; shown on a device that pretends to be CUDA."""

from __future__ import annotations

from typing import Any

import pytest
from pretended_cuda.client import Workshop

pytestmark = pytest.mark.timeout(600)  # the first one builds the device

QUICK: dict[str, Any] = {"steps": 2, "restore": "no"}


def verdicts(answer: dict[str, Any]) -> dict[str, str]:
    assert "error" not in answer, answer["error"]
    assert answer["first_use"] is None, (
        f"the process that forks began to use CUDA: {answer['first_use']}"
    )
    return {each["plan"]: each["verdict"] for each in answer["certificates"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plans"),
    [
        ("few in float32", ("data=2", "shard=2")),
        pytest.param("float32", ("data=2", "shard=2"), marks=pytest.mark.slow),
        pytest.param(
            "float32",
            (
                "tensor=2",
                "pipeline=2 microbatches=4",
                "servers=1 workers=2",
                "place=2",
                "data=2 deterministic=yes",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sound_plans_pass(shop: Workshop, job: str, plans: tuple[str, ...]):
    """In float32 and float64, and from each other's checkpoints."""
    answer = shop.verify(job, *plans, devices="cuda:0-3")
    assert verdicts(answer) == dict.fromkeys(plans, "passed"), answer["described"]
    assert [each["resumed_from"] for each in answer["certificates"]] == ["single", *plans[:-1]]
    device = answer["document"]["device"]
    assert device["kind"] == "cuda" and device["name"] == "Pretended" and len(device["ranks"]) == 4
    assert device["tf32"] == {
        "matrix products": False,
        "convolutions": True,
        "recurrent layers": True,
    }
    for words in (
        "cuda (Pretended, 9.0), one device with deterministic algorithms; ranks on cuda:0,",
        "TF32             on for convolutions and recurrent layers; off for matrix products",
    ):
        assert words in answer["table"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plans"),
    [("gan", ("data=2", "shard=2")), ("distillation", ("pipeline=2 microbatches=4", "tensor=2"))],
)
def test_sound_plans_of_a_step_of_ones_own_pass(shop: Workshop, job: str, plans: tuple[str, ...]):
    """What the step draws is drawn on one GPU and on ranks' GPUs alike."""
    assert verdicts(shop.verify(job, *plans, devices="cuda:0-1")) == dict.fromkeys(plans, "passed")


@pytest.mark.slow
def test_default_plans_are_those_that_the_devices_are_enough_for(shop: Workshop):
    plan_verdicts = verdicts(shop.verify("blocks", devices="cuda:0-3", **QUICK))
    assert len(plan_verdicts) == 18 and set(plan_verdicts.values()) == {
        "passed"
    }  # all but the one of eight ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan"), [("few in float32", "data=2"), ("blocks", "shard=2"), ("gan", "data=2")]
)
def test_a_run_checks_its_first_update(shop: Workshop, job: str, plan: str):
    """One GPU takes the step before ranks start, and no process holds a GPU that forks them."""
    trained = shop.train(job, plan, "cuda:0-1", check=True)
    check = trained.summary["check"]
    assert check["verdict"] == "passed" and check["seconds"] > 0, check
    assert trained.first_use is None


@pytest.mark.slow
def test_a_run_with_a_mistake_of_one_gpu_is_refused(shop: Workshop):
    """The second GPU's ranks are wrong, and the first one takes the step alone."""
    answer = shop.ask("wrong on the second GPU", "data=2", "cuda:0-1", check=True)
    assert "the first update under 'data=2' is not what one device computes" in answer["error"]


def test_a_mistake_of_one_gpu_is_found(shop: Workshop):
    """It is in ranks on that GPU alone: the third device here has no rank."""
    job, plan = "wrong on the second GPU", "data=2"
    answer = shop.verify(job, plan, devices="cuda:0-1", **QUICK)
    assert (
        verdicts(answer) == {plan: "failed"} and "is off by" in answer["certificates"][0]["reason"]
    )
    assert verdicts(shop.verify(job, plan, devices="cuda:2,cuda:3,cuda:1", **QUICK)) == {
        plan: "passed"
    }


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cuda:2-3", None])
def test_a_mistake_of_one_gpu_is_not_found_elsewhere(shop: Workshop, devices: str | None):
    """No proof on CPUs can see it."""
    answer = shop.verify("wrong on the second GPU", "data=2", devices=devices, **QUICK)
    assert verdicts(answer) == {"data=2": "passed"}


@pytest.mark.slow
def test_one_device_is_a_gpu(shop: Workshop):
    """The model has no kernels for CPUs, where ranks are unless GPUs are named."""
    assert verdicts(shop.verify("on GPUs alone", "data=2", devices="cuda:0-1", **QUICK)) == {
        "data=2": "passed"
    }
    assert (
        "no kernel for the CPU"
        in shop.verify("on GPUs alone", "data=2", devices=None, **QUICK)["error"]
    )
    assert "all ranks are on the CPU; --devices cuda:0-3 proves plans on GPUs" in shop.printed()


@pytest.mark.slow
def test_coupled_samples_are_named(shop: Workshop):
    """GPUs join the statistics of replicas, and not those of micro-batches."""
    answer = shop.verify("statistics", "data=2 microbatches=2", devices="cuda:0-1", **QUICK)
    assert verdicts(answer) == {"data=2 microbatches=2": "coupled"}
    assert verdicts(shop.verify("statistics", "data=2", devices="cuda:0-1", **QUICK)) == {
        "data=2": "passed"
    }
    assert (
        "2 BatchNorm layers, such as '2', use the statistics of a micro-batch"
        in answer["described"][0]
    )


def test_draws_are_compared_switched_off(shop: Workshop):
    answer = shop.verify("dropout", "data=2", devices="cuda:0-1", **QUICK)
    assert verdicts(answer) == {"data=2": "passed"}
    assert answer["document"]["randomness"]["switched_off"]["blocks.0.3"] == ["native_dropout"]


@pytest.mark.slow
def test_an_operator_without_a_deterministic_form_is_named(shop: Workshop):
    """One device goes on without; a plan that promises it is refused."""
    plans = "data=2", "data=2 deterministic=yes"
    answer = shop.verify("without a deterministic form", *plans, devices="cuda:0-1", **QUICK)
    assert verdicts(answer) == {plans[0]: "passed", plans[1]: "refused"}
    table = " ".join(answer["table"].split())
    assert "one device with deterministic algorithms but for put_; ranks on cuda:0" in table
    assert (
        "up to rounding alone: operators without a deterministic form are used (put_)"
        in answer["document"]["note"]
    )
    described = " ".join(answer["described"][1].split())
    assert "the operator 'put_' has no deterministic form on this device" in described


@pytest.mark.parametrize(
    ("plan", "devices", "message"),
    [
        (
            "data=3",
            "cuda:0-1",
            "plan 'data=3' has 3 ranks, and --devices names 2 devices: cuda:0, cuda:1\n\n"
            "hint: plans of at most 2 ranks, or no --devices",
        ),
        ("data=2", "cuda:3-4", "there is no cuda:4: this machine has 4 GPUs"),
    ],
)
def test_devices_that_are_too_few_are_refused(
    shop: Workshop, plan: str, devices: str, message: str
):
    answer = shop.verify("blocks", plan, devices=devices)
    assert message in answer["error"] and answer["exit_code"] == 2


def test_tf32_counts_where_it_is_used(shop: Workshop):
    """Of jobs with layers of matrix products, of convolutions and of recurrence; in float64; in bf16."""
    tf32, full, double, half = 2.0**-10, 2.0**-23, 2.0**-52, 2.0**-7
    assert shop.check("roundings") == {
        "default": [full, tf32, full, double, half],
        "matrix products": [tf32, tf32, tf32, double, half],
        "nothing": [full, full, full, double, half],
    }
