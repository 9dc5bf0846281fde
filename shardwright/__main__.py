"""`python -m shardwright COMMAND`, and the console script `shardwright`."""

import os
import signal
import sys


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the rest is imported, Ctrl-C ends us without a word
    if os.getcwd() not in sys.path and "" not in sys.path:  # where the user's modules are, as under `python -m`
        sys.path.insert(0, os.getcwd())
    from shardwright.stages.command_line import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
