"""Shardwright plans and runs the training of a PyTorch model on several devices.

In a checkout `pipeline`, `stages`, `conf` and `seven_stages.yaml` (dvc.yaml, by a name that DVC does not look for) are
links to what lies beside this folder; a wheel has them here.
"""

__version__ = "0.2.0"
