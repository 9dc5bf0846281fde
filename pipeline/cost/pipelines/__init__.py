"""Pipelines: orders of work, messages, and the play of a step."""
