"""`python -m gyre_core.cli`: the same as `gyre`."""

from gyre_core.cli.main import main

if __name__ == "__main__":
    main()
