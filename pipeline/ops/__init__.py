"""The op table: one entry per op, one file per family, found by listing this folder.

A rule holds the op's line of named dims, from which its sharding strategies follow, what it costs, what it saves for
backward, and how generated code calls it. An op without a rule runs replicated, so any exported graph can be planned.
"""
