"""The command line and the seven stages: trace, profile, cluster, solve, checkpoint, codegen, train."""
