"""The ``mlxserve`` command, also as ``python -m mlxserve``."""

from __future__ import annotations

import os
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. A Ctrl-C while it is still being imported ends the process without a word."""
    try:
        from mlxserve import cli
    except KeyboardInterrupt:
        os._exit(130)
    cli.main()


if __name__ == "__main__":
    main()
