"""``python -m dsnet`` is ``dsnet``."""

import sys

from dsnet.cli import main

if __name__ == "__main__":
    sys.exit(main())
