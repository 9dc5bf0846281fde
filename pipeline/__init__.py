"""The foundation every stage stands on: types, op table, cost model, runtime, configuration, artifacts, tracking."""

if __name__ != "shardwright.pipeline":  # a second copy of every table and type would answer to it
    raise ImportError(f"it is imported as shardwright.{__name__}, also in a checkout", name=__name__)
