"""``python -m mlxserve``: the same as the ``mlxserve`` command."""

from mlxserve.cli import main

if __name__ == "__main__":
    main()
