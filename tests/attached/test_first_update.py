"""The first update of a loop whose loss is a function is checked before the run, as a job's is."""

from __future__ import annotations

import pytest

from tests.attached.scripts import ATTACHED, told
from tests.attached.test_function_form import FUNCTION

pytestmark = pytest.mark.checked_runs


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


LOGGED = FUNCTION.replace("batch[1])", "batch[1]) + 0 * run.rows").replace(
    "lambda batch:", "lambda batch: run.log(one=1.0) or"
)


@pytest.mark.sweep(1)
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("plan", ["data=2 microbatches=2", "tensor=2"])
def test_the_first_update_of_a_function_is_checked(tmp_path, plan, capfd):
    text = LOGGED if plan.startswith("data") else FUNCTION
    text = f'open(os.environ["TOLD"] + ".started", "a").write("1")\n{text}'.replace(
        "open(", "import os\nopen(", 1
    )

    ended = told(tmp_path, text, plan, check=True)
    assert ended["figures"]["check"]["verdict"] == "passed"
    assert "not checked" not in capfd.readouterr().err
    assert len((tmp_path / "told.json.started").read_text()) == 3

    again = told(tmp_path, text, plan, check=True, run=tmp_path / "again")
    assert again["figures"]["check"]["verdict"] == "passed"
    assert len((tmp_path / "told.json.started").read_text()) == 5  # it is remembered


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_function_that_is_no_mean_over_rows_is_told(tmp_path, capfd):
    text = FUNCTION.replace("batch[1])", 'batch[1], reduction="sum")')

    ended = told(tmp_path, text, "data=2", check=True)

    assert ended["figures"]["check"]["verdict"] == "coupled"
    assert "note: cutting a batch changes what this job computes" in capfd.readouterr().err


@pytest.mark.usefixtures("own_cache")
def test_a_loss_that_is_computed_is_not_checked_and_the_run_says_so(tmp_path, capfd):
    ended = told(tmp_path, ATTACHED, "data=2", check=True)

    error = capfd.readouterr().err
    assert error.count("not checked against one device") == 1
    assert "paceline verify" in error and "--plan 'data=2'" in error
    assert ended["figures"]["check"]["verdict"] == "unchecked"


@pytest.mark.sweep(1)
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("before", "why"),
    [("run.log(rate=0.1)", None), ("run.gather(x)", "the script calls run.gather")],
)
def test_what_a_loop_does_before_its_loss_is_no_failure(tmp_path, before, why):
    text = FUNCTION.replace(
        "        loss = run.backward", f"        {before}\n        loss = run.backward"
    )

    ended = told(tmp_path, text, "data=2", check=True)

    check = ended["figures"]["check"]
    assert check["verdict"] == ("unchecked" if why else "passed")
    assert (why or "") in (check["reason"] or "")
