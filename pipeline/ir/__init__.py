"""Every domain type, as frozen dataclasses on the standard library alone."""
