"""Performance bars, each one command: `python -m benchmarks.NAME` prints a table and, last, one JSON object."""
