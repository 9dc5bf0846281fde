"""Shardwright plans and runs the training of a PyTorch model on several devices.

From Python: `import shardwright as sw`, then `sw.plan`, `sw.parallelize` and what stands beside them in `_OFFERED`
(docs/python.md). Each is imported when it is asked for: `import shardwright` alone brings no torch.

In a checkout `pipeline`, `stages`, `conf`, `docs` and `seven_stages.yaml` (dvc.yaml, by a name that DVC does not look
for) are links to what lies beside this folder; a wheel has them here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.api.fit import fit
    from shardwright.api.parallel import ParallelModule, parallelize
    from shardwright.api.plan import ModelPlan, load
    from shardwright.api.planning import plan, profile
    from shardwright.api.price import price
    from shardwright.api.verify import verify
    from shardwright.pipeline.base.errors import ShardwrightError

__version__ = "0.2.0"
__all__ = [
    "ModelPlan",
    "ParallelModule",
    "ShardwrightError",
    "fit",
    "load",
    "parallelize",
    "plan",
    "price",
    "profile",
    "verify",
]
_OFFERED = {
    "ParallelModule": "api.parallel",
    "ModelPlan": "api.plan",
    "ShardwrightError": "pipeline.base.errors",
    "fit": "api.fit",
    "load": "api.plan",
    "parallelize": "api.parallel",
    "plan": "api.planning",
    "price": "api.price",
    "profile": "api.planning",
    "verify": "api.verify",
}


def __getattr__(name: str) -> object:
    if name not in _OFFERED:
        raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
    return getattr(import_module(f"shardwright.{_OFFERED[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
