"""Accuracy by source."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.published.predict import predict
from benchmarks.published.rows import Case, read


def main(path: Path) -> int:
    skipped, cases = defaultdict(list), defaultdict(list)
    for found in read(path):
        if isinstance(found, Case):
            cases[found.source].append(found)
        else:
            skipped[found[0]].append(found[2])
    for source, listed in cases.items():
        done = [predict(case) for case in listed]
        r = [p.ratio for p in done if p.ratio]
        if r:
            err = [abs(x - 1) for x in r]
            c = statistics.median([math.log(p.case.step_s / p.case.flops * len(p.case.cluster.devices)) for p in done if p.ratio])
            const = [abs(math.exp(c) * p.case.flops / len(p.case.cluster.devices) / p.case.step_s - 1) for p in done if p.ratio]
            print(f"{source:14} {len(r):4d} MAPE {statistics.mean(err):.3f} median {statistics.median(err):.3f} p90 {sorted(err)[int(.9*len(err))]:.3f} bias {statistics.median(r):.3f} const {statistics.median(const):.3f}")
        m = [(p.found.peak_memory_bytes, p.case.memory_bytes, sum(p.found.needs[0].ledger.values())) for p in done if p.case.memory_bytes]
        if m:
            print('     memory', len(m), 'tensors/measured', round(statistics.median(a / b for a, b, _ in m), 3))
    for source, reasons in skipped.items():
        counted = defaultdict(int)
        for reason in reasons: counted[reason] += 1
        print(source, dict(counted))
    return 0
