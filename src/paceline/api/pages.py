"""The pages of the documentation, as an installation has them."""

from __future__ import annotations

from pathlib import Path

from paceline.base.errors import UsageError, nearest

# A wheel holds the pages in the package. A checkout that was installed with --editable has them beside `src`.
_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "docs", _PACKAGE.parents[1] / "docs")


def pages() -> dict[str, Path]:
    """Return the file of each page by name, such as `job` or `strategies/data`.

    Raises:
        UsageError: this installation has no pages.
    """
    for folder in _PLACES:
        if (folder / "index.md").is_file():
            return {
                path.relative_to(folder).with_suffix("").as_posix(): path
                for path in sorted(folder.rglob("*.md"))
            }
    raise UsageError(
        f"this installation of Paceline has no pages: there is no index.md in {_PLACES[0]}",
        hint="pip install --force-reinstall with a wheel that was built from a whole checkout",
    )


def page(name: str) -> Path:
    """Return the file of one page. `.md` and a folder `docs/` before the name may be left out.

    Raises:
        UsageError: there is no such page.
    """
    known = pages()
    wanted = name.removeprefix("docs/").removesuffix(".md")
    if wanted not in known:
        raise UsageError(f"there is no page '{name}'; {nearest(wanted, known)}")
    return known[wanted]


def title(path: Path) -> str:
    """Return the title of a page: its first heading."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line[2:] for line in lines if line.startswith("# ")), path.stem)
