"""The configuration of a project: schemas, loading with errors that name file and line, experiments, reference."""

from __future__ import annotations

from pipeline.config.experiment import apply_experiment, experiments, overrides, try_settings
from pipeline.config.load import load_config, load_part, saved_file
from pipeline.config.pipelines import PIPELINE_AXIS
from pipeline.config.reference import reference
from pipeline.config.schema import (
    GROUPS,
    Backend,
    Checkpoint,
    Cluster,
    ClusterSource,
    Config,
    Data,
    Device,
    DType,
    Model,
    Only,
    Pipeline,
    PlanUse,
    Precision,
    Preset,
    Probe,
    Recompute,
    Root,
    Search,
    Simulate,
    Solve,
    TensorSpec,
    Tracking,
    Train,
    TrainEngine,
)
from pipeline.config.source import listing

__all__ = [
    "GROUPS",
    "PIPELINE_AXIS",
    "Backend",
    "Checkpoint",
    "Cluster",
    "ClusterSource",
    "Config",
    "DType",
    "Data",
    "Device",
    "Model",
    "Only",
    "Pipeline",
    "PlanUse",
    "Precision",
    "Preset",
    "Probe",
    "Recompute",
    "Root",
    "Search",
    "Simulate",
    "Solve",
    "TensorSpec",
    "Tracking",
    "Train",
    "TrainEngine",
    "apply_experiment",
    "experiments",
    "listing",
    "load_config",
    "load_part",
    "overrides",
    "reference",
    "saved_file",
    "try_settings",
]
