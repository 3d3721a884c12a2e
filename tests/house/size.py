"""How large the code is, however it is laid out: Python tokens without comments, docstrings and the ends of lines.

python tests/house/size.py           # of each folder of the package, beside its budget
python tests/house/size.py --write   # lets the budgets be what is there
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "paceline"
BUDGETS = Path(__file__).with_name("budgets.json")
_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@cache  # tests ask twice, and it takes four seconds of the whole package
def token_lines(text: str) -> list[int]:
    """The line of each token that counts, in order."""
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (ast.get_docstring(node, clean=False) is not None):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return [
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _SKIPPED
        and not (token.type == tokenize.STRING and token.start[0] in documented)
    ]


def sizes() -> Counter[str]:
    """Tokens by folder of the package; what stands at its root is "."."""
    tokens: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        tokens[parts[0] if len(parts) > 1 else "."] += len(
            token_lines(path.read_text(encoding="utf-8"))
        )
    return tokens


if __name__ == "__main__":
    now = sizes()
    budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    for folder, count in now.most_common():
        print(f"{folder:14}{count:9,} of {budgets.get(folder, 0):9,}")
    print(f"{'all':14}{now.total():9,} of {sum(budgets.values()):9,}")
    if "--write" in sys.argv:
        BUDGETS.write_text(json.dumps(dict(sorted(now.items())), indent=1) + "\n")
