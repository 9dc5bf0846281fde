"""The op table: one entry per op, one file per family (FAMILIES of table.py).

A rule holds the op's line of named dims, from which its sharding strategies follow, what it costs, what it saves for
backward, and how generated code calls it. For an op without a rule strategies are discovered by trying (discovery/);
where none is found it runs replicated, so any exported graph can be planned.
"""

from shardwright.pipeline.ops.table import register

__all__ = ["register"]
