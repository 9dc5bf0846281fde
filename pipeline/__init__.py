"""The foundation every stage stands on: types, op table, cost model, runtime, configuration, artifacts, tracking."""
