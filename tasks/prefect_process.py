"""`python -m tasks.prefect_process server start ...`: Prefect's command line, ending with its parent."""

import sys


def main() -> None:
    from gyre_core.process import end_with_parent

    end_with_parent()
    from prefect.cli import app

    sys.argv[0] = "prefect"
    app()


if __name__ == "__main__":
    main()
