"""Names of the ops of ours (pipeline/ops/own.py), for those who need no torch."""

CONSTANT = "shardwright.tensor.default"
EMBEDDING_BAG = "shardwright.embedding_bag.default"
MODES = ("sum", "mean", "max")  # what the number of an embedding bag means
