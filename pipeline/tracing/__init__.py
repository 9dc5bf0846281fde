"""The user's module as a graph of ops: built without memory for weights, exported, lowered, cut into a chain."""
