"""`python -m tests.scripts`: run the ports of all scripts under all plans, and write the page about them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path


def main() -> int:
    """Print every comparison, and return 1 if one is wrong or a bug is not found."""
    import torch

    from .page import comparisons_of_page, found_of_page, page
    from .ported import FORMS, PLANS, SCRIPTS, WRONG, compare, found_bugs

    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=__doc__)
    parser.add_argument("--scripts", default="*", help="names, with *")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), metavar="PLAN")
    parser.add_argument("--bugs", action="store_true", help="plant bugs into a loop, too")
    parser.add_argument(
        "--write", type=Path, help="the page of the table; it keeps what is not run this time"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    comparisons = []
    with tempfile.TemporaryDirectory(prefix="paceline-scripts-") as folder:
        for script in SCRIPTS:
            if not fnmatch(script.name, given.scripts):
                continue
            for port in script.ports:
                for plan in given.plans if port.form in given.forms else ():
                    comparison = compare(port, plan, Path(folder))
                    comparisons.append(comparison)
                    print(
                        f"{script.name:<33}{port.form:<9}{plan:<12}{comparison.verdict:<9}"
                        f"{comparison.reason}",
                        flush=True,
                    )
        found = found_bugs(Path(folder)) if given.bugs else {}
    for name, is_found in found.items():
        print(f"{name:<33}{'found' if is_found else 'NOT FOUND'}")
    if given.write:
        text = given.write.read_text(encoding="utf-8") if given.write.exists() else ""
        known = {(each.port, each.plan): each for each in comparisons_of_page(text)}
        known |= {(each.port, each.plan): each for each in comparisons}
        given.write.write_text(
            page(list(known.values()), found_of_page(text) | found), encoding="utf-8"
        )
    return int(any(each.verdict == WRONG for each in comparisons) or not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
