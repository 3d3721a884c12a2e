"""`docs/who-is-right.md` from the results: one table for all, then each job with its figures and the reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.trainers.contenders import AS_DOCUMENTED, CONTENDERS, OTHER_JOB
from benchmarks.trainers.jobs import BATCH, JOBS, RANKS, STOP_AFTER
from benchmarks.trainers.measure import Result
from benchmarks.trainers.ranks import TIMEOUT_S
from benchmarks.trainers.reasons import DESCRIPTIONS, NOTES, REASONS

EXACT = (
    2e-6  # in float32 the order of additions moves these weights by 1e-7 and, through AdamW, 1e-6
)

INTRODUCTION = f"""# Who is right

<!-- Written by `python -m benchmarks.trainers`; change the text in benchmarks/trainers/. -->

This page shows which trainers compute on two ranks what one device computes, for six small jobs that are easy to get
wrong. Seven trainers run each job. Each trainer's script in `benchmarks/trainers/` is written as that trainer's own
documentation tells a user to write it.

    python -m benchmarks.trainers        # measures all of them and writes this page

Each script trains on {RANKS} CPU ranks with gloo, one thread a rank, in float32, with a global batch of {BATCH}. A
plain PyTorch loop on one device starts from the same weights and takes the same samples in the same order. The page
compares both:

- **off by** gives the greatest difference of a final weight, a running statistic, or a step's training loss (averaged
  over the ranks). The size of the weights is about 0.3. `benchmarks/trainers/results.json` has all three.
- **exact** means that no difference is above {EXACT:.0e}, which rounding in float32 can cause, and that the trainer
  took as many steps as one device.
- **mended** means that the job as documented differs or fails, and that a setting or a few lines make it exact. The
  tables below show these changes.
- **fails** means that the script raised an error or did not end within {TIMEOUT_S:.0f} seconds.

Each trainer takes samples in its own order: DDP, Accelerate, Transformers and Keras in sequence; DeepSpeed, Lightning
(even if the loader says `shuffle=False`) and Paceline in a permutation with a fixed seed. For each trainer, one device
takes the samples in the same order, so the order causes no difference. `SyncBatchNorm`, which most trainers offer for
BatchNorm, needs GPUs, so this page does not show its effect.
"""

LIMITS = """## Limits

This page leaves out:

- Steps with several models or optimizers, such as a GAN's. All trainers here can express them; in Paceline they are
  [a step of one's own](own-step.md). None was compared here.
- Networks, GPUs, mixed precision, sharded weights, and clipping. Trainers also differ in these.
- Speed: see [results](results.md#throughput-compared-with-other-trainers).

The authors of Paceline chose jobs in which they had seen errors. Each script has a few dozen lines. If a script does
not follow its trainer's current documentation, please report it.
"""


def page(document: Mapping[str, Any]) -> str:
    """The whole page. document: what results.json holds."""
    results = [Result(**row) for row in document["results"]]
    return "\n".join(
        [
            INTRODUCTION,
            *overview(results, document["versions"]),
            "",
            f"Last measured on {document['date']} with `python -m benchmarks.trainers`"
            " (`pip install -e '.[bench]'` installs the trainers).",
            "",
            *(
                line
                for job in JOBS
                for line in section(job, [row for row in results if row.job == job])
            ),
            *sources(document["versions"]),
            "",
            LIMITS,
        ]
    )


def overview(results: Sequence[Result], versions: Mapping[str, str]) -> Iterator[str]:
    """A row a job, a column a trainer."""
    yield f"| | {' | '.join(f'{name} {version}' for name, version in versions.items())} |"
    yield "|---" * (len(versions) + 1) + "|"
    for job, about in JOBS.items():
        cells = [
            verdict([row for row in results if (row.trainer, row.job) == (name, job)])
            for name in versions
        ]
        yield f"| {about.title} | {' | '.join(cells)} |"


def verdict(rows: Sequence[Result]) -> str:
    """Of a job as documented, and whether a setting mends it."""
    documented = [row for row in rows if row.setting == AS_DOCUMENTED]
    if not documented:
        return "not run"
    outcome = in_short(documented[0])
    is_mended = not is_exact(documented[0]) and any(
        is_exact(row) and row.setting != OTHER_JOB for row in rows
    )
    return f"{outcome}; mended" if is_mended else outcome


def in_short(row: Result) -> str:
    if row.failure is not None:
        return "fails"
    if row.steps != row.expected_steps:
        return f"{row.steps} steps for {row.expected_steps}"
    return "exact" if is_exact(row) else f"off by {max(figures(row)):.2g}"


def is_exact(row: Result) -> bool:
    return (
        row.failure is None
        and row.steps == row.expected_steps
        and all(figure <= EXACT for figure in figures(row))
    )


def figures(row: Result) -> list[float]:
    return [figure for figure in (row.weights, row.buffers, row.loss) if figure is not None]


def section(job: str, rows: Sequence[Result]) -> Iterator[str]:
    """A job: what it is, the outcome of every run, and the reasons for those that are not exact."""
    yield f"## {JOBS[job].title[0].upper()}{JOBS[job].title[1:]}"
    yield ""
    yield wrapped(DESCRIPTIONS[job].format(stop_after=STOP_AFTER))
    yield ""
    yield "| trainer | how | |"
    yield "|---|---|---|"
    for row in rows:
        how = (
            "as documented"
            if row.setting == AS_DOCUMENTED
            else CONTENDERS[row.trainer].settings[job][row.setting]
        )
        yield f"| {row.trainer} | {how} | {in_short(row)} |"
    yield ""
    yield from reasons(rows)
    yield ""


def reasons(rows: Sequence[Result]) -> Iterator[str]:
    """Why runs are not exact; runs with one reason share a line. What is always to be known comes last."""
    explained: dict[str, dict[str, list[str]]] = {}  # text, how, trainers
    for row in rows:
        if is_exact(row):
            continue
        text = REASONS.get((row.trainer, row.job, row.setting), "The reason is not known.")
        if row.failure:
            text += f" It ends with `{_quoted(row.failure)}`."
        how = (
            ""
            if row.setting == AS_DOCUMENTED
            else f" with {CONTENDERS[row.trainer].settings[row.job][row.setting]}"
        )
        explained.setdefault(text, {}).setdefault(how, []).append(row.trainer)
    for text, by_how in explained.items():
        subject = "; ".join(f"{_listed(trainers)}{how}" for how, trainers in by_how.items())
        yield wrapped(f"- {subject}: {text}", indent="  ")
    for trainer in dict.fromkeys(row.trainer for row in rows):
        if note := NOTES.get((trainer, rows[0].job)):
            yield wrapped(f"- {trainer}: {note}", indent="  ")


def wrapped(text: str, *, indent: str = "") -> str:
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _quoted(error: str) -> str:
    """The first sentence of an error, in the width of a line or two."""
    sentence = error.split(". ")[0].removesuffix(".").replace("`", "'").replace("|", "/")
    return sentence if len(sentence) <= 200 else f"{sentence[:200]}..."


def _listed(trainers: Sequence[str]) -> str:
    *rest, last = (f"**{name}**" for name in trainers)
    return f"{', '.join(rest)} and {last}" if rest else last


def sources(versions: Mapping[str, str]) -> Iterator[str]:
    """Which pages each script follows."""
    yield "## What each script follows"
    yield ""
    yield "| trainer | package | pages of its documentation | script |"
    yield "|---|---|---|---|"
    for name, version in versions.items():
        contender = CONTENDERS[name]
        yield (
            f"| {name} | {contender.distribution} {version} | {contender.pages} | "
            f"`benchmarks/trainers/{contender.module}.py` |"
        )
