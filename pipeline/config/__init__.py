"""The configuration of a project: schemas, loading with errors that name file and line, experiments, reference."""

# ruff: noqa: F401 - all names here are for others

from pipeline.config.consistency import PIPELINE_AXIS
from pipeline.config.experiment import apply_experiment, experiments, find_sweep, overrides, set_keys, try_settings
from pipeline.config.load import Draft, load_config, load_part, read_draft, saved_file
from pipeline.config.schema import (
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
from pipeline.config.source import listing
