"""The configuration of a project: schemas, loading with errors that name file and line, experiments, reference."""

# ruff: noqa: F401 - all names here are for others

from shardwright.pipeline.config.consistency import PIPELINE_AXIS
from shardwright.pipeline.config.experiment import (
    apply_experiment,
    experiments,
    find_sweep,
    overrides,
    set_keys,
    try_settings,
)
from shardwright.pipeline.config.load import Draft, load_config, load_part, read_draft, saved_file
from shardwright.pipeline.config.schema import (
    GROUPS,
    Backend,
    Checkpoint,
    ClusterSettings,
    ClusterSource,
    Config,
    Device,
    DType,
    ModelSettings,
    NormStatistics,
    Only,
    Pipeline,
    PlanUse,
    Precision,
    Preset,
    Probe,
    Recompute,
    Search,
    Simulate,
    Solve,
    SweepSettings,
    TensorSpec,
    Tracking,
    TrainEngine,
)
from shardwright.pipeline.config.source import listing
