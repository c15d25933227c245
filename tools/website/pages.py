"""Writes the pages of docs/reference, which are generated from the code.

python -m tools.website.pages
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.website import api_page, errors_page, http_page, metrics_page, settings_page

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "api": api_page.page,
    "errors": errors_page.page,
    "http": http_page.page,
    "metrics": metrics_page.page,
    "settings": settings_page.page,
}


def path(name: str) -> Path:
    return FOLDER / f"{name}.md"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        path(name).write_text(page())


if __name__ == "__main__":
    main()
