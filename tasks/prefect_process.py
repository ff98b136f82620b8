"""`python -m tasks.prefect_process server start ...`: Prefect's command line, ending with its parent."""

import signal
import sys


def main() -> None:
    from gyre_core.process import end_with_parent, limit_malloc_arenas

    limit_malloc_arenas()

    # A worker turns SIGTERM into SIGINT; a shell's background job hands down an ignored SIGINT, and then it never ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()
    from prefect.cli import app

    sys.argv[0] = "prefect"
    app()


if __name__ == "__main__":
    main()
