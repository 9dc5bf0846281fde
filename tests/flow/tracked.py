"""What a project's MLflow store holds."""

from __future__ import annotations

from typing import Any

from tests.flow.project import STAGES, Project


class Tracked:
    def __init__(self, project: Project) -> None:
        from mlflow.tracking import MlflowClient

        uri = f"sqlite:///{project.root}/runs/mlflow.db"
        self.client: Any = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = self.client.get_experiment_by_name("shardwright")
        self.runs = self.client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])

    def stages(self, run: Any) -> dict[str, str]:
        return {name: run.data.tags.get(f"stage.{name}", "") for name in STAGES}

    def files(self, run: Any, folder: str) -> list[str]:
        return [entry.path for entry in self.client.list_artifacts(run.info.run_id, folder)]

    def series(self, run: Any, key: str) -> list[Any]:
        return sorted(self.client.get_metric_history(run.info.run_id, key), key=lambda point: point.step)
