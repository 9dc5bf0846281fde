"""`shardwright init` and `upgrade`: what is written, what is left alone, and what an older project becomes."""

from __future__ import annotations

import re
import shutil
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from shardwright import __version__
from shardwright.pipeline.base.errors import ConfigError
from shardwright.pipeline.base.log import get_log
from shardwright.pipeline.base.stage import STAGES
from shardwright.pipeline.config import apply_experiment, load_config, read_draft
from shardwright.pipeline.config.made_by import FILE, MadeBy, digest, made_by
from shardwright.pipeline.config.source import listing
from shardwright.stages.check import check
from shardwright.stages.command_line import main
from shardwright.stages.project import init, upgrade
from shardwright.stages.project.files import new_files

OLD = Path(__file__).parent / "made_by_0_1_0"
SOURCE = Path(__file__).parents[2]
MINE = "module: {_target_: pipeline.models.mine.Net}  # in a copy\nbatch: {}\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    assert init.run(tmp_path) == 0
    return tmp_path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """As 0.1.0 had it: a copy of the repository, with a setting, a class and a stage of the user's own."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    edit(tmp_path / "conf/config.yaml", "cluster: local_cpu", "cluster: preset_cpu")
    edit(tmp_path / "conf/config.yaml", "solve: glpk", "solve: highs")
    (tmp_path / "conf/model/mine.yaml").write_text(MINE)
    (tmp_path / "pipeline/models").mkdir(parents=True)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


# -- init -------------------------------------------------------------------------------------------------------------


def test_a_new_project_is_valid_and_holds_every_file_of_conf(project, monkeypatch):
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    config = load_config(project)
    assert config.choices["model"] == "my_model" and config.code == "my_model.py"
    assert {str(path.relative_to(SOURCE)) for path in SOURCE.glob("conf/**/*.yaml")} <= set(texts(project))
    assert made_by(project).version == __version__


def test_stages_depend_on_the_version_and_not_on_source(project):
    both = (yaml.safe_load((folder / "dvc.yaml").read_text()) for folder in (project, SOURCE))
    (written, plots), (ours, our_plots) = ((each["stages"], each["plots"]) for each in both)
    assert plots == our_plots
    assert set(written) == set(ours) > set(STAGES)
    for name, stage in written.items():
        assert stage["cmd"].startswith("shardwright ") and stage["deps"][0] == FILE, name
        assert not [dep for dep in stage["deps"] if dep.startswith(("pipeline", "stages"))], name
        for key in ("params", "outs", "metrics"):
            assert stage.get(key) == ours[name].get(key), name


def test_pages_that_a_project_names_can_be_read(project, capsys):
    every = "".join(texts(project).values())
    assert not re.findall(r"docs/[a-z-]+\.md", every)
    named = set(re.findall(r"`shardwright docs ([a-z-]+)`", every))
    assert {"configuration", "constraints", "price"} <= named
    for page in named:
        assert main_in(project, "docs", page) == 0
        assert capsys.readouterr().out == (SOURCE / f"docs/{page}.md").read_text()
    assert main_in(project, "docs", "docs/fit.md") == main_in(project, "docs") == 0
    told = capsys.readouterr().out
    assert told.startswith("# Does it fit?") and "what-if               What if\n" in told
    assert main_in(project, "docs", "confguration") == 2
    assert (
        capsys.readouterr().err
        == "error: shardwright docs: there is no page confguration; did you mean 'configuration'?\n"
    )


def test_asked_again_it_changes_nothing(project, capsys):
    edit(project / "conf/train/adamw.yaml", "steps: 20", "steps: 30")
    (project / "conf/cluster/v100.yaml").unlink()
    before = texts(project)
    assert main_in(project, "init") == 0
    assert texts(project) == before
    assert "nothing was changed" in capsys.readouterr().out


def test_what_no_stage_runs_without_is_written_again(project, capsys):
    (project / "dvc.yaml").unlink()
    (project / "conf/plan/README.md").unlink()
    (project / "conf/cluster/v100.yaml").unlink()
    assert main_in(project, "init") == 0
    assert "wrote again" in capsys.readouterr().out
    assert (project / "dvc.yaml").exists() and (project / "conf/plan/README.md").exists()
    assert not (project / "conf/cluster/v100.yaml").exists()
    (project / "dvc.yaml").unlink()
    assert main_in(project, "upgrade") == 0 and (project / "dvc.yaml").exists()


def test_every_experiment_that_is_written_can_be_chosen(project):
    for name in listing(project, "experiment"):
        apply_experiment(project, name)
        config = load_config(project)
        assert name != "text" or (project / config.data.dataset["path"]).is_file()


def test_what_was_cut_off_is_done_again(project):
    (project / FILE).unlink()
    (project / "conf/train/adamw.yaml").unlink()
    assert init.run(project) == 0
    assert texts(project).keys() - {FILE} == new_files().keys()


def main_in(folder: Path, *words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return main(list(words))


def test_a_folder_is_made_and_files_beside_it_stay(tmp_path, capsys):
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "training").mkdir()
    (tmp_path / "training/my_model.py").write_text("# mine\n")
    assert main_in(tmp_path, "init", "training") == 0
    assert (tmp_path / "training/my_model.py").read_text() == "# mine\n" and (tmp_path / "training" / FILE).exists()
    out = capsys.readouterr().out
    assert "left as they are: my_model.py" in out and "cd training" in out and "in no git repository" in out
    settings = ConfigParser()
    settings.read(tmp_path / "training/.dvc/config")
    assert settings["core"]["no_scm"] == "true"


@pytest.mark.parametrize(("name", "text"), [("dvc.yaml", "stages: {}\n"), ("conf/config.yaml", "lr: 1\n")])
def test_files_of_the_same_name_are_not_taken_over(tmp_path, capsys, name, text):
    (tmp_path / "conf").mkdir()
    (tmp_path / name).write_text(text)
    before = texts(tmp_path)
    assert main_in(tmp_path, "init") == 2
    error = capsys.readouterr().err
    assert name in error and "shardwright init training" in error and len(error.splitlines()) == 1
    assert texts(tmp_path) == before


def test_a_file_in_the_way_is_named(tmp_path, capsys):
    (tmp_path / "conf").write_text("")
    assert main_in(tmp_path, "init") == 2
    error = capsys.readouterr().err
    assert "conf: is in the way" in error and len(error.splitlines()) == 1 and texts(tmp_path) == {"conf": ""}


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"shardwright {__version__}\n"


def test_a_folder_in_place_of_a_file_is_named(tmp_path, capsys):
    (tmp_path / "dvc.yaml").mkdir()
    assert main_in(tmp_path, "init") == 2
    assert "dvc.yaml" in capsys.readouterr().err and not (tmp_path / FILE).exists()


# -- versions ---------------------------------------------------------------------------------------------------------


def test_a_project_of_another_version_is_refused_with_both_ways_out(project, capsys):
    edit(project / FILE, f'version: "{__version__}"', 'version: "0.0.9"')
    with pytest.raises(ConfigError, match=r"shardwright upgrade.*shardwright==0\.0\.9"):
        load_config(project)
    assert main_in(project, "init") == 2


def test_a_project_of_a_newer_version_is_left_alone(project, capsys):
    edit(project / FILE, f'version: "{__version__}"', 'version: "99.0"')
    before = texts(project)
    for command in ("check", "init", "upgrade"):
        assert main_in(project, command) == 2
        error = capsys.readouterr().err
        assert "pip install shardwright==99.0" in error and "shardwright upgrade" not in error
    assert texts(project) == before


@pytest.mark.parametrize(
    "text", ["version: 3\nfiles: {}\n", "version: '1'\n", "version: new\nfiles: {}\n", "- 1\n", ""]
)
def test_a_damaged_version_file_is_told(project, text):
    (project / FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"conf/shardwright\.yaml"):
        load_config(project)


# -- upgrade ----------------------------------------------------------------------------------------------------------


def test_a_project_of_0_1_0_is_brought_forward(old, capsys):
    edit(old / "conf/train/adamw.yaml", "micro_batches: 1  #", "micro_batches: 2  # mine:")
    assert main_in(old, "upgrade") == 0
    config = load_config(old)
    assert config.train.gradient_accumulation == 2
    assert config.model.module["_target_"] == "shardwright.pipeline.models.gpt.build"
    assert "gradient_accumulation: 2  # mine: forward" in (old / "conf/train/adamw.yaml").read_text()
    assert "_target_: pipeline.models.mine.Net}  # in a copy" in (old / "conf/model/mine.yaml").read_text()
    assert (old / "dvc.yaml").read_text() == new_files()["dvc.yaml"]
    assert {"conf/measured/README.md", "conf/plan/README.md", "runs/.gitignore"} <= set(texts(old))
    told = capsys.readouterr().out
    assert "-micro_batches: 2" in told and "+gradient_accumulation: 2" in told and "from" not in told.split()[:1]
    check(old, read_draft(old), get_log("test"))
    before = texts(old)
    assert main_in(old, "upgrade") == 0 and texts(old) == before
    assert "nothing to do" in capsys.readouterr().out


def test_a_copied_makefile_calls_the_commands_of_today(old, capsys):
    before = (old / "Makefile").read_text()
    (old / "train.sbatch").write_text("srun python -m stages.train.worker\n")
    (old / "stages").mkdir()
    for name in ("stages/__init__.py", "stages/run.sh"):
        (old / name).write_text("python -m stages run\n")
    assert main_in(old, "upgrade") == 0
    told = capsys.readouterr().out
    now = (old / "Makefile").read_text()
    assert "run: setup\n\t@shardwright run\n" in now and "@python -m shardwright.pipeline.config >" in now
    assert now == before.replace("python -m stages ", "shardwright ").replace("-m pipeline", "-m shardwright.pipeline")
    assert "-\t@python -m stages run" in told and "+\t@shardwright run" in told
    assert f"Makefile: it installs this copy, of the older version: let it install shardwright {__version__}\n" in told
    assert "train.sbatch: `python -m stages` is `shardwright` now" in told and "run.sh" not in told


def test_a_makefile_of_a_project_of_today_is_the_users(project):
    (project / "Makefile").write_text("run:\n\tpython -m stages run\n")
    edit(project / FILE, f'version: "{__version__}"', 'version: "0.1.9"')
    assert upgrade.run(project, only_show=False) == 0
    assert "python -m stages run" in (project / "Makefile").read_text()


def test_stages_of_the_user_stay(old):
    own = "  plot:\n    cmd: python plot.py  # mine\n    deps:\n      - runs/train/report.json\n"
    own += "plots:\n  - mine.csv\n  - loss:\n      x: an older one\n  - rate:\n      x: step\n"
    (old / "dvc.yaml").write_text((old / "dvc.yaml").read_text() + own)
    assert upgrade.run(old, only_show=False) == 0
    written, ours = (yaml.safe_load(text) for text in ((old / "dvc.yaml").read_text(), new_files()["dvc.yaml"]))
    assert written["stages"].pop("plot") == {"cmd": "python plot.py", "deps": ["runs/train/report.json"]}
    assert written["stages"] == ours["stages"]
    assert written["plots"] == [*ours["plots"], "mine.csv", {"rate": {"x": "step"}}]
    assert "# mine" in (old / "dvc.yaml").read_text()


@pytest.mark.parametrize("more", ["plots:\n  mine.csv:\n    x: step\n", "params:\n  - mine.yaml\n"])
def test_what_the_user_has_beside_the_stages_stays(old, more):
    (old / "dvc.yaml").write_text((old / "dvc.yaml").read_text() + more)
    assert upgrade.run(old, only_show=False) == 0
    found, ours = yaml.safe_load((old / "dvc.yaml").read_text()), yaml.safe_load(new_files()["dvc.yaml"])
    plots = [*ours["plots"], *([{"mine.csv": {"x": "step"}}] if "plots" in more else [])]
    assert found == {**ours, **yaml.safe_load(more), "plots": plots}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("dvc.yaml", b"# cmd: python -m stages x\nstages: [\n", "dvc.yaml:3: bad YAML"),
        ("dvc.yaml", b"# cmd: python -m stages x\nvars: []\n", "dvc.yaml: holds no stages"),
        ("dvc.yaml", b"# cmd: python -m stages \xe9\n", "dvc.yaml:1"),
        ("conf/model/mine.yaml", b"# \xe9\n", "conf/model/mine.yaml:1"),
        ("conf/model/mine.yaml", b"a: [\n", "conf/model/mine.yaml:2"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_nothing_is_written(old, capsys, name, text, told):
    (old / name).write_bytes(text)
    assert main_in(old, "upgrade") == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1 and not (old / FILE).exists()


def test_what_is_shown_is_not_written(old, capsys):
    before = texts(old)
    assert main_in(old, "upgrade", "--show") == 0
    assert texts(old) == before and "+gradient_accumulation: 1" in capsys.readouterr().out


def test_files_that_nobody_edited_become_those_of_today(project):
    """A version whose adamw.yaml was another one, and which had no sgd.yaml; v100.yaml was removed by the user."""
    adamw, highs = project / "conf/train/adamw.yaml", project / "conf/solve/highs.yaml"
    edit(adamw, "steps: 20", "steps: 10")
    texts_then = {path: text for path, text in texts(project).items() if path not in (FILE, "conf/train/sgd.yaml")}
    then = MadeBy("0.1.9", {path: digest(text) for path, text in texts_then.items()})
    (project / FILE).write_text(then.text())
    edit(highs, "gap: 1e-6", "gap: 1e-3")
    for gone in ("conf/train/sgd.yaml", "conf/cluster/v100.yaml"):
        (project / gone).unlink()
    assert upgrade.run(project, only_show=False) == 0
    assert "steps: 20" in adamw.read_text() and "gap: 1e-3" in highs.read_text()
    assert (project / "conf/train/sgd.yaml").exists() and not (project / "conf/cluster/v100.yaml").exists()
    assert made_by(project).version == __version__


def test_code_that_imports_the_old_names_is_named(old, capsys):
    (old / "pipeline/__init__.py").write_text("")
    (old / "my_ops.py").write_text("import torch\nfrom pipeline.ops import register\n")
    (old / "gone.py").symlink_to("nowhere")
    (old / "folder.py").mkdir()
    edit(old / "dvc.yaml", "stages:\n", "stages:\n  keep:\n    cmd: python -m stages export --out x\n")
    assert upgrade.run(old, only_show=True) == 0
    told = capsys.readouterr().out
    assert "my_ops.py: import shardwright.pipeline" in told and "no longer read" in told and "pipeline/" in told
    assert "dvc.yaml: `python -m stages` in your stages" in told


def test_packages_of_the_user_with_our_old_names_are_theirs(project, capsys):
    """In a project of 0.2.0 or later; their classes may even be called as ours are."""
    (project / "pipeline/models").mkdir(parents=True)
    (project / "pipeline/__init__.py").write_text("from pipeline import models\n")
    edit(project / "conf/model/my_model.yaml", "my_model.Model", "pipeline.models.gpt.build")
    edit(project / FILE, f'version: "{__version__}"', 'version: "0.1.9"')
    assert upgrade.run(project, only_show=False) == 0
    told = capsys.readouterr().out
    assert "import shardwright" not in told and "no longer read" not in told
    assert "_target_: pipeline.models.gpt.build" in (project / "conf/model/my_model.yaml").read_text()


def test_a_class_of_the_user_in_a_file_of_ours_keeps_its_name(old):
    edit(old / "conf/model/gpt_small.yaml", "pipeline.models.gpt.build", "pipeline.models.gpt.MyNet")
    assert upgrade.run(old, only_show=False) == 0
    assert "_target_: pipeline.models.gpt.MyNet" in (old / "conf/model/gpt_small.yaml").read_text()


def test_the_repository_itself_is_no_project(old, capsys):
    (old / "shardwright").mkdir()
    (old / "shardwright/__init__.py").write_text("")
    before = texts(old)
    assert main_in(old, "upgrade") == 2 and texts(old) == before
    assert "git pull" in capsys.readouterr().err


def test_no_project_is_told(tmp_path, capsys):
    assert main_in(tmp_path, "upgrade") == 2
    assert "shardwright init" in capsys.readouterr().err
