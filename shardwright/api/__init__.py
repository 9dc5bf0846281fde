"""Shardwright from Python: what `import shardwright as sw` offers (docs/python.md)."""
