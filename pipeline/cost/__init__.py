"""Seconds and bytes of ops, conversions and memory, from the cluster's figures."""
