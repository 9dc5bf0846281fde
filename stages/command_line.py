"""The command line: `shardwright COMMAND`. One line for a user's mistake, exit status 2."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import sys
from pathlib import Path

from shardwright import __version__
from shardwright.pipeline.base import log as logs
from shardwright.pipeline.base.errors import ShardwrightError, Unforeseen
from shardwright.pipeline.base.files import told
from shardwright.pipeline.base.signals import Interrupted, interruptible
from shardwright.stages import commands

STAGES = ("trace", "profile", "cluster", "solve", "checkpoint", "codegen", "train")
PAGE_AFTER = ("codegen", "train")  # stages that tell something new of the plan
# Python looks for garbage after 700 new objects. What commands import and build stays: a tenth of trace went there.
USUAL, SELDOM = gc.get_threshold(), (300_000, 50, 50)


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    root = Path.cwd()
    log = logs.get_log(arguments.command, arguments.verbosity)
    gc.set_threshold(*SELDOM)
    try:
        with told(root), interruptible():
            if arguments.command in STAGES:
                run_stage(arguments.command, root, log)
                return 0
            status = commands.COMMANDS[arguments.command].run(root, arguments, log)
            sys.stdout.flush()
            return status
    except ShardwrightError as error:
        for line in error.lines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except Exception as error:  # whatever it is, the user reads one line; a report of it needs the rest
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written at the end
            return 1
        log.debug("what happened", exc_info=error)
        print(f"error: {Unforeseen(error, arguments.command).line()}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        status = error.status if isinstance(error, Interrupted) else 130
        print("interrupted" if status == 130 else f"interrupted by {error}", file=sys.stderr)
        return status
    finally:
        gc.set_threshold(*USUAL)


def _reader_is_gone() -> bool:
    """Whether who read our output, `head` perhaps, has seen enough; other pipes that break are no user's doing."""
    output = select.poll()
    output.register(sys.stdout, select.POLLOUT)
    return any(state & select.POLLERR for _, state in output.poll(0))


def run_stage(name: str, root: Path, log: logs.Log) -> None:
    from shardwright.pipeline.base.stage import STAGES as specs
    from shardwright.pipeline.base.stage import execute
    from shardwright.pipeline.config import load_config
    from shardwright.pipeline.launch.place import find_place

    load_config(root)  # before the stage's own imports: a mistake in conf/ is told at once
    module = importlib.import_module(f"shardwright.stages.{name}.run")
    if name == "train":  # a training loop's garbage holds tensors
        gc.set_threshold(*USUAL)
    if name == "train" and (place := find_place(os.environ)) and place.rank:
        module.take_part(root, log)
    else:
        run = module.run
        if name in PAGE_AFTER:
            from shardwright.stages.report.run import with_page

            run = with_page(run, name)
        execute(specs[name], run, root, log)


def _parser() -> argparse.ArgumentParser:
    about = "Plan and run the training of a PyTorch model on several devices. In the folder of a project:"
    parser = argparse.ArgumentParser(prog="shardwright", description=about)
    parser.add_argument("--version", action="version", version=f"shardwright {__version__}")
    loudness = argparse.ArgumentParser(add_help=False)
    loudness.add_argument("-v", "--verbose", dest="verbosity", action="store_const", const=logs.VERBOSE)
    loudness.add_argument("-q", "--quiet", dest="verbosity", action="store_const", const=logs.QUIET)
    loudness.set_defaults(verbosity=logs.NORMAL)
    below = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in STAGES:
        below.add_parser(name, parents=[loudness], help=f"run the stage {name} on what is in runs/")
    for name, command in commands.COMMANDS.items():
        own = below.add_parser(name, parents=[loudness], help=command.help)
        for names, options in command.arguments:
            own.add_argument(*names, **options)
    return parser
