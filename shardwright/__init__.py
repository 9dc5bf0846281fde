"""Shardwright plans and runs the training of a PyTorch model on several devices.

In a checkout `pipeline`, `stages` and `conf` are links to the folders beside this one; a wheel has them here.
"""

__version__ = "0.2.0"
