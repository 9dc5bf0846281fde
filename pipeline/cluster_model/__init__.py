"""What a training step of a large transformer costs on a large cluster, by formula: no graph, no solver."""
