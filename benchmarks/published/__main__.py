"""`python -m benchmarks.published FILE.csv`: see `report.py` for what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.published.report import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
