"""The command ``dsnet``. It lies outside the package, whose import takes a while: Ctrl-C may come then."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Runs a command; its exit status, 130 where Ctrl-C came before the package was there."""
    try:
        from dsnet.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("dsnet: stopped", file=sys.stderr)
        return 130
