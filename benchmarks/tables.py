"""Writes the tables of README.md and docs/ from the figures in benchmarks/results.

    python -m benchmarks.tables [--check]

A table stands between ``<!-- table NAME [batch=N] -->`` and ``<!-- end -->``; NAME is a JSON file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.slicing import METHODS

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/benchmarks.md")
PLACE = re.compile(r"(<!-- table (\S+?)(?: batch=(\d+))? -->\n).*?(<!-- end -->)", re.S)


def slicing_table(name: str, batch: int | None) -> str:
    """The table as Markdown, with a line that says what it was measured on."""
    data = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    header = ["network", "batch", *METHODS, "slicing / ideal"]
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    for row in data["results"]:
        if batch in (None, row["batch"]):
            ms = [row["times"][method]["ms"] for method in METHODS]
            ratio = row["times"]["slicing"]["ms"] / row["times"]["ideal"]["ms"]
            cells = [row["network"], str(row["batch"]), *(f"{t:.2f}" for t in ms), f"{ratio:.3f}"]
            lines.append("| " + " | ".join(cells) + " |")
    where = f"{data['machine']}, {data['threads']} threads" if "cpu" in name else data["machine"]
    lines.append(f"\n*{where}, torch {data['torch']}, {data['dtype']}, {data['date']}*")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return PLACE.sub(lambda m: m[1] + slicing_table(m[2], None if m[3] is None else int(m[3])) + m[4], text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail where a page is out of date"
    )
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(page)
            if not args.check:
                path.write_text(filled(text), encoding="utf-8")
    print(f"{'out of date' if args.check else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
