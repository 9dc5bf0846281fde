"""The first host of a probe, alone or with those that join: settings of `probe` in, the cluster out, in JSON."""

import json
import logging
import sys

from shardwright.pipeline.base.errors import ClusterError
from shardwright.pipeline.config import ClusterSettings, ClusterSource, Device, Probe
from shardwright.pipeline.ir.codec import encode
from shardwright.stages.cluster import meeting
from shardwright.stages.cluster.measure import measure

given = json.loads(sys.argv[1])
meeting.SILENT_S = given.pop("silent_s", meeting.SILENT_S)
settings = ClusterSettings(ClusterSource.probe, Device.cpu, given.pop("devices", 1), probe=Probe(**given))
try:
    print(json.dumps(encode(measure(settings, "ours", logging.getLogger()))))
except ClusterError as error:
    print(error.line(), file=sys.stderr)
    sys.exit(2)
