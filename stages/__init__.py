"""The seven rooms: trace, profile, cluster, solve, checkpoint, codegen, train. None imports another."""
