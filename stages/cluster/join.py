"""Another host, NAME in `probe.hosts`: `python -m shardwright.stages.cluster.join FIRST:PORT --host NAME`."""

from __future__ import annotations

import argparse
import sys

from shardwright.pipeline.launch.launch import LaunchNode, run_ranks
from shardwright.pipeline.launch.work_folder import LaunchFailed
from shardwright.stages.cluster.meeting import Arrival, Guest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardwright.stages.cluster.join", description=__doc__.splitlines()[0]
    )
    parser.add_argument("first", metavar="FIRST:PORT", help="the first host of `probe.hosts`, and `probe.port`")
    parser.add_argument("--host", required=True, help="this host, as `probe.hosts` calls it")
    parser.add_argument("--devices", type=int, default=1, help="number of devices (on CPU: processes)")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the first host")
    arguments = parser.parse_args(argv)
    address, _, port = arguments.first.rpartition(":")
    try:
        own = Arrival(arguments.host, arguments.devices)
        take_part(Guest(address, int(port), own, arguments.wait), arguments.devices, arguments.wait)
    except LaunchFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def take_part(guest: Guest, devices: int, wait: float) -> None:
    word = guest.wait(wait)
    job = {**word["job"], "host": guest.host}
    node = LaunchNode(word["nodes"], word["hosts"].index(guest.host), *word["torchrun"])
    try:
        run_ranks("shardwright.stages.cluster.probe", job, devices, job["timeout_s"], guest.listen, node)
    except LaunchFailed as error:
        guest.failed(str(error))
        raise
    guest.through()


if __name__ == "__main__":
    sys.exit(main())
