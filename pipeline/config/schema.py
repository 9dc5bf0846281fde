"""What each file under conf/ may say: one dataclass per file, one documented field per key.

The dataclasses are OmegaConf structured configs: the loader fills and types them with `OmegaConf.structured` and
`OmegaConf.to_object`. What OmegaConf cannot express (ranges, help) stands in each field's metadata as a `Rule`, which
the checks (check.py) and the reference page (reference.py) both read, so the page cannot drift from the checks.

Units: GB is 10^9 bytes, MB is 10^6 bytes, `_us` is microseconds, `_s` is seconds.

A file's schema is frozen; one nested in it is not, because OmegaConf cannot fill a frozen dataclass inside another.
"""

# ruff: noqa: RUF009 - `setting` and `section` only wrap dataclasses.field

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from shardwright.pipeline.ir.codec import encode

MISSING: Any = "???"  # OmegaConf's mark of a mandatory key; written out so that this module imports nothing slow

MOST_DEVICES = 65536
AUTO, SOLVE = "auto", "solve"


def between(least: float, most: float) -> dict[str, float]:
    """A range, with both ends."""
    return {"at_least": least, "at_most": most}


# Ranges that several keys have
DEVICES = between(1, MOST_DEVICES)
GBYTES = {"above": 0, "at_most": 1e6}
GFLOPS = {"above": 0, "at_most": 1e9}
US = between(0, 1e6)  # microseconds
SECONDS = {"above": 0, "at_most": 1e7}  # about 115 days: what operating systems accept as a timeout
SEED = between(0, 2**63 - 1)
SHARE = {"above": 0, "at_most": 1}
STEPS = between(0, 10**12)


class ValueForm(Enum):
    """Extra demands on a value that its type does not tell."""

    TARGET = "a mapping with `_target_` (a dotted importable name) and keyword arguments"
    BY_NAME = "a non-empty mapping from a name to a mapping"
    CHOICE = "the name of a file in the group's folder"
    DIMS = "a mapping from an op, such as mylib.scale.default, to its line of dims, such as 'b n, n -> b n'"
    SIZES = "a mapping from the name of an axis to its size, such as {dp: 2, tp: 4}"
    SAVED = "the name of a saved plan, a file in conf/plan/, without its ending"
    COUNT = "an integer of at least 1, solve or null"
    SWITCH = "true, false or auto"
    LAYOUTS = "a mapping from a parameter or a module, with * and ?, to a layout such as 'S(0) on tp'"


@dataclass(frozen=True)
class KeyRule:
    """What a key means and which values it takes, beyond its type."""

    help: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    form: ValueForm | None = None
    meant: Mapping[str, str] = field(default_factory=dict)  # another word for it -> the one that is taken
    formerly: str = ""  # what the key was called


def setting(help: str, default: Any = MISSING, **rule: Any) -> Any:
    """A documented key, with the other fields of its KeyRule; without a default it is mandatory."""
    return field(default=default, metadata={"rule": KeyRule(help, **rule)})


def section(help: str, schema: type) -> Any:
    """A nested mapping whose keys are those of another schema."""
    return field(default_factory=schema, metadata={"rule": KeyRule(help)})


def rule_of(item: dataclasses.Field[Any]) -> KeyRule:
    rule = item.metadata["rule"]
    assert isinstance(rule, KeyRule), item.name
    return rule


# ---- conf/config.yaml


@dataclass
class Tracking:
    enabled: bool = setting("Log every run to MLflow.", True)
    uri: str | None = setting("MLflow tracking URI; null is a SQLite store under `runs/`.", None)
    experiment: str = setting("MLflow experiment that the runs belong to.", "shardwright")
    run_name: str | None = setting("Name of the run; null: by model, cluster, mesh and budget.", None)


@dataclass(frozen=True)
class Root:
    model: str = setting("File in `conf/model/`: what is trained.", form=ValueForm.CHOICE)
    data: str = setting("File in `conf/data/`: what it is trained on.", form=ValueForm.CHOICE)
    cluster: str = setting("File in `conf/cluster/`: where it is trained.", form=ValueForm.CHOICE)
    solve: str = setting("File in `conf/solve/`: how the sharding is searched.", form=ValueForm.CHOICE)
    checkpoint: str = setting("File in `conf/checkpoint/`: what is recomputed.", form=ValueForm.CHOICE)
    train: str = setting("File in `conf/train/`: how long and with which optimizer.", form=ValueForm.CHOICE)
    code: str = setting(
        "Folder or file with the model's own source: DVC runs trace again when it changes. Outside the project, its"
        " folder is put on the import path.",
        "pipeline/models",
    )
    tracking: Tracking = section("Where runs are recorded.", Tracking)


# ---- conf/model/*.yaml

Precision = StrEnum("Precision", ["fp32", "bf16", "amp"])
NormStatistics = StrEnum("NormStatistics", ["whole", "per_rank"])
DType = StrEnum("DType", ["float32", "float64", "bfloat16", "float16", "int64", "int32", "bool"])


@dataclass
class TensorSpec:
    shape: list[int] = setting("Size of every dim of the global batch, batch dim first.", at_least=1)
    dtype: DType = setting("Element type.")


@dataclass(frozen=True)
class ModelSettings:
    module: dict[str, Any] = setting("What builds the `torch.nn.Module`, and its arguments.", form=ValueForm.TARGET)
    batch: dict[str, TensorSpec] = setting(
        "Tensors of one training step by the argument name of the model's `forward`.", form=ValueForm.BY_NAME
    )
    precision: Precision = setting(
        "`fp32`: types as the model has them; `bf16`: weights and float inputs in bfloat16; `amp`: float32 weights"
        " under bfloat16 autocast.",
        Precision.fp32,
    )
    compile: bool = setting(
        "Compile the blocks of the program with `torch.compile`. On a GPU here, profile measures what they take.", False
    )
    cuda_graphs: Any = setting(
        "On a GPU, capture the passes of a step once as a CUDA graph and replay it: where the host is what a step waits"
        " for or blocks are compiled (`auto`), always or never (`docs/gpu.md`).",
        AUTO,
        form=ValueForm.SWITCH,
    )
    batch_norm: NormStatistics = setting(
        "Batch norms take mean and variance of the whole batch whatever the plan (`whole`), or each rank those of its"
        " own part of it, as under `DistributedDataParallel`; the running statistics are then those of rank 0"
        " (`per_rank`, see docs/training.md).",
        NormStatistics.whole,
    )
    ops: dict[str, str] | None = setting(
        "How ops of your own may be split: op to line of dims (`docs/how-to-add-an-op.md`).", None, form=ValueForm.DIMS
    )


# ---- conf/data/*.yaml


@dataclass(frozen=True)
class Data:
    dataset: dict[str, Any] = setting(
        "What builds the map-style dataset; its items are dicts of tensors without the batch dim.",
        form=ValueForm.TARGET,
    )
    shuffle: bool = setting("Draw the samples in a random order.", False)
    seed: int = setting("Seed of that order.", 0, **SEED)
    held_out: dict[str, Any] | None = setting(
        "What builds the data set that `evaluate` of the train file reads, of items like those of `dataset`.",
        None,
        form=ValueForm.TARGET,
    )


# ---- conf/cluster/*.yaml

ClusterSource = StrEnum("ClusterSource", ["probe", "preset", "simulate"])
OverlapMode = StrEnum("OverlapMode", ["none", "runtime", "megatron"])
Device = StrEnum("Device", ["cpu", "cuda"])


@dataclass
class Probe:
    max_message_mb: float = setting("Largest message sent between devices, in MB.", 4.0, above=0, at_most=1024)
    repeats: int = setting("Times each measurement is repeated; outliers are left out.", 7, **between(3, 1000))
    budget_s: float = setting("Seconds for the links: messages grow as far as it allows.", 8.0, **SECONDS)
    timeout_s: float = setting("Seconds after which the probe is given up.", 300.0, **SECONDS)
    hosts: list[str] | None = setting(
        "Addresses of the hosts, the one that runs the stage first; null is this machine alone (`docs/clusters.md`).",
        None,
    )
    port: int = setting(
        "TCP port of the first host at which the others meet; the next one is used too.", 29511, **between(1024, 65000)
    )
    join_s: float = setting("Seconds that hosts have to join.", 60.0, **SECONDS)


@dataclass
class ReachedShares:
    products: float | None = setting("Share of the rate that large products reach; null: `efficiency`.", None, **SHARE)
    unaligned: float | None = setting(
        "Share of that in products with rows that do not begin on 16 bytes; null: as on an H200.", None, **SHARE
    )
    memory: float | None = setting("Share of the memory bandwidth that is reached; null: `efficiency`.", None, **SHARE)
    kernel_us: float | None = setting(
        "Time in which the host issues a kernel, in microseconds; null: as that of an H200.", None, **US
    )
    links: float = setting("Share of the links' bandwidth that collectives reach.", 1.0, **SHARE)
    network: float = setting("Share of the network's bandwidth that they reach.", 1.0, **SHARE)
    collective_us: float = setting("Time that any collective takes beside its messages, in microseconds.", 0.0, **US)


@dataclass
class Preset:
    matmul_gflops: float | None = setting(
        "Matrix multiplication in float32 on one device, in 10^9 operations a second.", None, **GFLOPS
    )
    half_gflops: float | None = setting("The same in bfloat16 or float16; null is as fast as float32.", None, **GFLOPS)
    bf16_gflops: float | None = setting(
        "The same in bfloat16 where float16 is faster; null is `half_gflops`.", None, **GFLOPS
    )
    memory_gbytes_per_s: float | None = setting("Memory bandwidth of one device, in GB a second.", None, **GBYTES)
    efficiency: float = setting("Share of the figures above that programs reach.", 1.0, **SHARE)
    processors: int | None = setting(
        "Multiprocessors of a GPU, over which kernels are spread; null is 132.", None, **between(1, 100000)
    )
    launch_us: float = setting("Time to start one operator, in microseconds.", 10.0, **US)
    latency_us: float | None = setting("Time of an empty message between two devices, in microseconds.", None, **US)
    link_gbytes_per_s: float | None = setting(
        "Bandwidth between two devices, one direction, in GB (not gigabits) a second.", None, **GBYTES
    )
    island: int | None = setting("Devices of a host that share these links; null is all of them.", None, **DEVICES)
    cross_latency_us: float | None = setting("Latency between islands of a host; null is `latency_us`.", None, **US)
    cross_gbytes_per_s: float | None = setting(
        "Bandwidth between islands of a host, needed where there are several.", None, **GBYTES
    )
    network_latency_us: float | None = setting("Latency between two hosts, needed where there are several.", None, **US)
    network_gbytes_per_s: float | None = setting(
        "Bandwidth of one host to the others, one direction, all its network cards together.", None, **GBYTES
    )
    network_cards: int = setting("Network cards of a host: a device alone uses one.", 1, **between(1, 1024))
    hidden: float | None = setting(
        "Of computation and a collective at the same time, the part of the shorter one that costs nothing: 1 is no"
        " contention; null is 0.8 on GPUs and 0 on CPUs.",
        None,
        **between(0, 1),
    )
    reached: ReachedShares = section(
        "What training steps reach of these figures: written by the command `calibrate` (`docs/price.md`).",
        ReachedShares,
    )


@dataclass
class Simulate:
    noise: float = setting("Spread of the simulated measurements, relative.", 0.1, **between(0, 0.2))
    seed: int = setting("Seed of that noise.", 0, **SEED)


@dataclass(frozen=True)
class ClusterSettings:
    source: ClusterSource = setting(
        "Measure the devices (`probe`), take the figures below (`preset`), or measure devices that are only imagined to"
        " have these figures (`simulate`)."
    )
    device: Device = setting(
        "Kind of device that is profiled and planned for, whatever this machine has.", meant={"gpu": "cuda"}
    )
    devices: int = setting("Number of devices of a host (on CPU: processes).", **DEVICES)
    nodes: int = setting("Number of hosts (`preset` and `simulate`).", 1, **DEVICES)
    per_host: list[int] | None = setting(
        "Devices of each host where hosts differ, such as [8, 4]; `devices` is then that of the largest.",
        None,
        **DEVICES,
    )
    memory_gb: float | None = setting("Memory of one device, in GB; null is measured (`probe` only).", None, **GBYTES)
    probe: Probe = section("How the devices are measured; read when `source: probe`.", Probe)
    preset: Preset = section(
        "Figures of the devices; `preset` and `simulate` need `memory_gb`, `matmul_gflops`, `memory_gbytes_per_s` and,"
        " for several devices, the links between them.",
        Preset,
    )
    simulate: Simulate = section("How measurements are imagined; read when `source: simulate`.", Simulate)
    overlap: OverlapMode = setting(
        "Collectives that are priced as running beside computation: those of this project's programs (`runtime`), those"
        " of Megatron's (`megatron`, to compare with what it reaches), or `none`; see docs/clusters.md.",
        OverlapMode.runtime,
    )

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Devices of each host that is described."""
        return tuple(self.per_host) if self.per_host else (self.devices,) * self.nodes

    @property
    def all_devices(self) -> int:
        """Of all hosts, described or to be measured."""
        probed = self.source is ClusterSource.probe
        return self.devices * len(self.probe.hosts or [""]) if probed else sum(self.host_sizes)


# ---- conf/solve/*.yaml

Backend = StrEnum("Backend", ["glpk", "highs"])
Search = StrEnum("Search", ["ilp", "dp", "large"])
Only = StrEnum("Only", ["any", "data", "zero", "tensor", "sequence"])
PlanUse = StrEnum("PlanUse", ["start", "as_is"])


@dataclass(frozen=True)
class Solve:
    backend: Backend = setting("Program that solves the integer linear program.")
    memory_budget_gb: float | None = setting(
        "Memory a plan may use on one device, in GB; null is the device's memory.", None, **GBYTES
    )
    time_limit_s: float = setting("Seconds for one solve.", 60.0, **SECONDS)
    gap: float = setting("Relative gap to the bound at which a plan counts as optimal.", 1e-6, at_least=0, below=1)
    frontier_points: int = setting("Plans along the time/memory frontier.", 6, **between(1, 64))
    glpsol: str | None = setting("Path of the `glpsol` program; null looks for it.", None)
    search: Search = setting(
        "How plans are searched for: dynamic programming with prices on memory, and the integer program where that"
        " leaves a gap (`ilp`), without the integer program (`dp`), or by the search for large problems (`large`),"
        " which needs no dynamic programming.",
        Search.ilp,
    )
    only: Only = setting(
        "Ways of working in parallel that a plan may mix: all (`any`), or just data parallelism, that and ZeRO, or"
        " tensor parallelism with or without a split sequence, or tensor parallelism with it (`sequence`).",
        Only.any,
    )
    constraints: dict[str, Any] | None = setting(
        "Layouts that parameters and modules must have, by name; see docs/constraints.md.", None, form=ValueForm.LAYOUTS
    )
    mesh: dict[str, Any] | None = setting(
        "Axes of the mesh and their sizes, slow links first, such as {dp: 2, tp: 4}; null tries the candidates of the"
        " cluster.",
        None,
        form=ValueForm.SIZES,
    )
    most_axes: int = setting("Axes that a candidate mesh may have.", 2, **between(1, 3))
    most_meshes: int = setting("Candidate meshes that are planned for, the most promising first.", 6, **between(1, 64))
    frontier_meshes: int = setting("Meshes of which plans are kept, the fastest first.", 3, **between(1, 64))
    submeshes: int = setting(
        "Meshes of each smaller number of devices of which plans are kept, for pipelines; 0 is none.",
        1,
        **between(0, 16),
        formerly="piece_meshes",
    )
    shard_only: str | None = setting("Module that alone may be split, by name, with * and ?; null is all.", None)
    seed: int = setting("Seed of the search for large problems.", 0, **SEED)
    plan: str | None = setting(
        "Saved plan: a file in `conf/plan/`, without its ending, copied from `runs/checkpoint/plan.json` or"
        " `runs/solve/frontier.json`; see docs/constraints.md.",
        None,
        form=ValueForm.SAVED,
    )
    plan_use: PlanUse = setting(
        "What the saved plan is for: the search starts from it and answers with none that is worse (`start`), or it is"
        " taken as it is and only priced anew (`as_is`).",
        PlanUse.start,
    )


# ---- conf/checkpoint/*.yaml

Recompute = StrEnum("Recompute", ["optimal", "full", "every", "off", "always", "except_last", "never"])
Pipeline = StrEnum("Pipeline", ["off", "solve", "gpipe", "1f1b", "interleaved", "zero_bubble"])  # order of its work


@dataclass(frozen=True)
class Checkpoint:
    recompute: Recompute = setting(
        "Which activations are dropped and computed again: the best choice within the memory budget (`optimal`), those"
        " of every link from its input (`full`), of every few blocks from theirs (`every`) or none (`off`); or as in"
        " GPipe all of a partition from its input (`always`), the same but for the last micro-batch (`except_last`) or"
        " none (`never`)."
    )
    every_blocks: int | None = setting(
        "Repeated blocks that are recomputed together; read with `recompute: every`, null is 1.",
        None,
        **between(1, 10**6),
    )
    pipeline: Pipeline = setting(
        "Cut the model into partitions on devices of their own: never (`off`), where that is faster, with the best"
        " schedule (`solve`), or always, with this one.",
        Pipeline("off"),
    )
    partitions: int | None = setting("Partitions of a pipeline; null is any number.", None, **between(2, MOST_DEVICES))
    boundaries: list[str] | None = setting(
        "Modules with which the partitions of a pipeline begin, but for the first, such as [blocks.6]; null is solved"
        " for.",
        None,
    )
    micro_batches: Any = setting(
        "Micro-batches of a step: null is `gradient_accumulation`, `solve` looks for the best multiple of that, of"
        " which each takes a slice of a pass. In a pipeline the batch need not divide: 10 samples in four are 3, 3, 2"
        " and 2.",
        None,
        form=ValueForm.COUNT,
    )
    slots_per_link: int = setting(
        "Memory slots per link of the chain in the optimal search: more is finer and slower.", 20, **between(1, 1000)
    )


# ---- conf/train/*.yaml

Decay = StrEnum("Decay", ["none", "linear", "cosine"])
BatchNorm = StrEnum("BatchNorm", ["exact", "deferred"])
TrainEngine = StrEnum("TrainEngine", ["planned", "ddp", "fsdp2", "single"])


@dataclass
class RateSchedule:
    warm_up: int = setting("Steps over which the learning rate rises to that of the optimizer.", 0, **STEPS)
    decay: Decay = setting("How it falls after that.", Decay.none, meant={"constant": "none"})
    decay_steps: int | None = setting(
        "Step, counted from the first, at which it has fallen to `least` and stays there; null is `steps`.",
        None,
        **between(1, 10**12),
        formerly="until",
    )
    least: float = setting("What is left of it then, as a part of the optimizer's.", 0.0, **between(0, 1))


@dataclass
class Evaluate:
    every: int = setting(
        "Steps from one evaluation on the `held_out` data to the next; the last step is followed by one too. 0: none.",
        0,
        **STEPS,
    )
    batches: int = setting(
        "Batches of the model's size that are read each time, the first of the data; fewer where it has fewer.",
        8,
        **between(1, 10**9),
    )


@dataclass
class Snapshotting:
    every: int = setting(
        "Steps from one snapshot of the training state to the next; one more follows the last step. 0: none.",
        0,
        **STEPS,
    )
    keep: int = setting(
        "How many are kept, the newest; with 1 also the one before, until a finite loss has proven the newest.",
        2,
        **between(1, 10**6),
    )
    background: bool = setting("Write them while training goes on; false: training waits.", True)


@dataclass(frozen=True)
class Train:
    steps: int = setting("Optimizer steps.", **between(1, 10**12))
    gradient_accumulation: int = setting(
        "Forward and backward passes of a step. The model's batch is that of one pass; each takes the next of the data,"
        " and the step is that of their mean loss.",
        1,
        **between(1, 10**6),
        formerly="micro_batches",
    )
    seed: int = setting("Seed of the weights and of dropout.", 0, **SEED)
    optimizer: dict[str, Any] = setting("What builds the optimizer, without its `params`.", form=ValueForm.TARGET)
    timeout_s: float | None = setting(
        "Seconds after which the whole run is given up, whether it makes progress or not, and so is `verify`. null: no"
        " limit but `hang_s`.",
        None,
        **SECONDS,
    )
    wait_s: float = setting(
        "Seconds that a rank waits for others: when they meet, and in each collective.", 1800.0, **SECONDS
    )
    accept_edited_module: bool = setting("Run `runs/codegen/module.py` even if it was edited by hand.", False)
    clip_norm: float | None = setting(
        "Largest norm of all gradients together; larger ones are scaled down to it. null: they are taken as they are.",
        None,
        above=0,
    )
    running_stats: BatchNorm = setting(
        "Running statistics of batch norms change with each micro-batch (`exact`), or once a step with mean and"
        " unbiased variance of all its micro-batches (`deferred`, as in GPipe). Each is normalised by its own in both.",
        BatchNorm.exact,
        formerly="batch_norm",
    )
    init_from: str | None = setting(
        "File with weights of the unsplit model, by its own names: `.safetensors`, its `.index.json`, or a state dict"
        " (`.pt`, `.pth`, `.bin`); null draws them with `seed`. DVC sees its name alone: after a change of its content"
        " run `dvc repro --force --single-item train`.",
        None,
    )
    export: bool = setting(
        "Write the trained weights to `runs/train/weights/model.safetensors`, whole and by the model's own names.",
        False,
    )
    schedule: RateSchedule = section("The learning rate of each step; see docs/training.md.", RateSchedule)
    evaluate: Evaluate = section("The loss on data that is not trained on.", Evaluate)
    trace_step: int | None = setting(
        "Step, from 0, of which the profiler's trace is written to `runs/train/trace-rank0.json`; null: none.",
        None,
        **between(2, 10**12),
    )
    snapshots: Snapshotting = section("The whole training state, to go on from; see docs/snapshots.md.", Snapshotting)
    resume: str = setting(
        "`auto`: go on from the newest snapshot of a run with the same settings that has not ended; `never`: begin"
        " anew; or the folder of a snapshot to begin from.",
        "auto",
    )
    max_restarts: int = setting(
        "How often the ranks are started again, from the newest snapshot, when one of them dies.",
        0,
        **between(0, 10**6),
    )
    hang_s: float | None = setting(
        "Seconds within which a step must follow the one before, and a batch the one before as the model evaluates;"
        " then a rank counts as hanging, and all are ended. What may take its time has four times as long"
        " (docs/snapshots.md). null: no limit but `timeout_s` and `wait_s`.",
        300.0,
        **SECONDS,
    )
    compare_replicas_every: int = setting(
        "Steps after which ranks that hold the same shard of a tensor compare its checksum; 0: never.", 0, **STEPS
    )
    engine: TrainEngine = setting(
        "What takes the steps: the plan's program (`planned`), or for comparison your own module under plain PyTorch on"
        " as many devices: `DistributedDataParallel` (`ddp`), `fully_shard` (`fsdp2`), or one process (`single`). See"
        " docs/baselines.md.",
        TrainEngine.planned,
    )


# ---- conf/experiment/*.yaml


@dataclass(frozen=True)
class Experiment:
    description: str = setting("What the experiment shows.")
    settings: list[str] = setting(
        "Changes, applied in this order: `group=file` chooses a file, `group.key=value` sets a key in the file then"
        " chosen."
    )


# ---- conf/sweep/*.yaml

Until = StrEnum("Until", ["checkpoint", "codegen", "train"])


@dataclass(frozen=True)
class SweepSettings:
    description: str = setting("What the sweep compares.")
    settings: list[str] = setting(
        "What is varied, as in an experiment, with commas between values: `cluster=a100_80,h100`. All are combined."
    )
    until: Until = setting("The last stage of each point: `checkpoint` plans, `train` also trains.", Until.checkpoint)


GROUPS: dict[str, type] = {
    "model": ModelSettings,
    "data": Data,
    "cluster": ClusterSettings,
    "solve": Solve,
    "checkpoint": Checkpoint,
    "train": Train,
}


@dataclass(frozen=True)
class Config:
    """The whole configuration: checked, with every default filled in."""

    root: Root
    model: ModelSettings
    data: Data
    cluster: ClusterSettings
    solve: Solve
    checkpoint: Checkpoint
    train: Train

    @property
    def choices(self) -> dict[str, str]:
        """The file chosen in each group, without its ending."""
        return {group: getattr(self.root, group) for group in GROUPS}

    @property
    def code(self) -> str:
        return self.root.code

    @property
    def tracking(self) -> Tracking:
        return self.root.tracking

    def plain(self, key: str) -> Any:
        """The value at a key such as `model` or `train.optimizer`, as JSON-able dicts, lists and scalars."""
        value: Any = self
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return encode(value)

    def digest(self, key: str) -> str:
        """SHA-256 of the value at a key: equal for equal meaning, whatever the file's comments, order or defaults."""
        text = json.dumps(self.plain(key), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()
