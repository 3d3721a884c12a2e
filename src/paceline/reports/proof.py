"""Shows the certificate of a verification as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.base.document import strict
from paceline.base.errors import UsageError
from paceline.proof.certificate import MARKS, comparison, facts, limits, remarks, verdict
from paceline.reports.html import Page, Section, Tile, day, place, plural, shown

_WHY = "no loss, gradient or weight differs from one device's by more than ten times what rounding does"


def of_proof(proof: Mapping[str, Any]) -> Page:
    """Return the page of certificate.json.

    Raises:
        UsageError: the certificate is damaged.
    """
    try:
        return Page(
            f"{_subject(proof)} · certificate",
            f"{plural(len(proof['plans']), 'plan')} · {day(proof['written'])}",
            _verdict(proof),
            _tiles(proof),
            _sections(proof),
            strict(proof),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the certificate is damaged: {error!r}", hint="paceline verify JOB writes a new one"
        ) from error


def _subject(proof: Mapping[str, Any]) -> str:
    job = proof["job"]
    return f"{place(job['path'])}:{job['function']}" if job else str(proof["model"]["class"])


def _verdict(proof: Mapping[str, Any]) -> dict[str, str]:
    plans = {
        kind: [each["plan"] for each in proof["plans"] if verdict(each) == kind] for kind in MARKS
    }
    passed, refused = plans.pop("passed"), plans.pop("refused")
    others = [name for names in plans.values() for name in names]
    if others:
        text = f"failed: {_named(others)} {'is' if len(others) == 1 else 'are'} not proven to equal one device"
    elif proof["passed"]:
        text = f"passed: {_named(passed)} equal{'s' * (len(passed) == 1)} one device"
    else:
        text = f"failed: {_named(refused)} can't run this model"
    return {
        "verdict": text,
        **({"why": _WHY} if proof["passed"] else {}),
        **({"passed": ", ".join(passed)} if others and passed else {}),
        **({"not run": f"{_named(refused)}: none for this model"} if refused else {}),
    }


def _named(plans: list[str]) -> str:
    return f"{len(plans)} plans" if len(plans) > 1 else "".join(plans) or "no plan"


def _tiles(proof: Mapping[str, Any]) -> list[Tile]:
    judged = [plan for plan in proof["plans"] if verdict(plan) != "refused"]
    model, run = proof["model"], proof["run"]
    precisions = list(
        dict.fromkeys(each["precision"] for plan in judged for each in plan["precisions"])
    )
    return [
        Tile("plans that passed", f"{sum(plan['passed'] for plan in judged)} of {len(judged)}"),
        Tile("compared", f"{run['steps']} steps", f"of {run['batch']} samples"),
        Tile("precisions", str(len(precisions)), " and ".join(precisions)),
        Tile("model", shown(model["parameters"]), "parameters"),
    ]


def _sections(proof: Mapping[str, Any]) -> list[Section]:
    return [
        Section(
            "Plans",
            "The largest difference from one device, and which part of its limit the nearest one uses up.",
            head=("plan", "in", "loss", "gradient", "weight", "of its limit"),
            rows=[
                (f"{MARKS[verdict(plan)]}: {plan['plan']}" * (nth == 0), *cells, f"{share}, {name}")
                for plan in proof["plans"]
                for nth, (*cells, share, name) in enumerate(map(comparison, plan["precisions"]))
            ],
        ),
        Section(
            "Remarks",
            rows=[
                (plan["plan"] * (nth == 0), remark)
                for plan in proof["plans"]
                for nth, remark in enumerate(remarks(plan))
            ],
        ),
        Section("What was compared", rows=list(facts(proof))),
        Section(
            "Limits",
            "How far rounding moves one device's own figures. A plan may differ by ten times as much.",
            head=("in", "of", "moves by", "limit", "step", "at"),
            rows=list(limits(proof["yardstick"])),
            folded="limits of each figure",
        ),
    ]
