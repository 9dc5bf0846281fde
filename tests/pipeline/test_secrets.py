"""No password and no token is readable in what is logged or told of a tracking store, wherever it stands."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwright.pipeline.base.errors import ShardwrightError
from shardwright.pipeline.base.secrets import without_secrets, without_settings
from shardwright.pipeline.tracking.store import Store

MANY = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SECRET = "Zx9-Qw7.Kp3"

letters = st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="\"'<>")
secrets = st.text(letters, min_size=6, max_size=20).filter(lambda text: any(c.isalnum() for c in text))
schemes = st.sampled_from(
    ["http", "https", "postgresql", "postgresql+psycopg2", "mysql+pymysql", "sqlite", "s3", "mssql"]
)
names = st.sampled_from(
    ["token", "access_token", "api_key", "X-Amz-Signature", "sig", "password", "%74oken", "sslpassword"]
)
hosts = st.sampled_from(["host", "mlflow.example.org:5000", "[::1]:5000"])


@pytest.mark.parametrize(
    "text",
    [
        f"https://{SECRET}@host/x",
        f"http://u:p@{SECRET}@host",
        f"http://user:{SECRET}/more#y@host:5000/a",
        f"https://host/api?token={SECRET}&x=1",
        f"https://host/api#access_token={SECRET}",
        f"https://host/a?x=1;sig={SECRET}",
        f"cannot reach postgresql+psycopg2://u:{SECRET}@db:5432/x and mysql://v:{SECRET}@other/y: timed out",
        f"Authorization: Bearer {SECRET}",
        f"headers {{'Authorization': 'Basic {SECRET}'}}",
        f"redirected to https%3A%2F%2Fuser%3A{SECRET}%40host",
        "s3 key AKIAABCDEFGHIJKLMNOP refused",
    ],
)
def test_a_line_of_a_log_has_no_secret(text):
    assert SECRET not in without_secrets(text)
    assert "AKIA" not in without_secrets(text)
    assert SECRET not in ShardwrightError(text).line()


def test_ordinary_lines_stay_as_they_are():
    for text in (
        "runs/trace/graph.json: its body is not valid (ops[3].args: 3); run `dvc repro trace`",
        "price: tokens=4096 dp=8 tp=4, key not known",
        "open http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning&compareRunsMode=CHART",
        "sqlite:////tmp/a project, 100%/runs/mlflow.db",
        "write to a@b.c, or see user@host",
        "file:///home/a%40b/runs",
    ):
        assert without_secrets(text, {}) == text


def test_a_setting_within_a_setting():
    assert without_secrets(f"x=https://host?a=b=token={SECRET}&d=2", {}) == "x=https://host?a=b=token=***&d=2"


def test_values_of_the_environment_are_hidden():
    environment = {"MLFLOW_TRACKING_TOKEN": SECRET, "MLFLOW_TRACKING_PASSWORD": "p w/d", "HOME": "/home/x"}
    assert (
        without_secrets(f"said {SECRET}, p w/d, p%20w%2Fd in /home/x", environment) == "said ***, ***, *** in /home/x"
    )


def test_what_a_driver_says():
    said = f'connection failed: password={SECRET} host=db, {{"token": "{SECRET}"}}, secret=\'{SECRET}\''
    assert SECRET not in without_settings(said, {})
    assert "host=db" in without_settings(said, {})


@pytest.mark.parametrize(
    "said",
    [
        f"""'error': '{{"password": "{SECRET}"}}'""",
        f"""{{"answer":{{"body":{{"api_key":"{SECRET}"}}}}}}""",
        f"""body='{{"a": "b", "token": "{SECRET}"}}'""",
        f"""note="as told: password={SECRET}\"""",
    ],
)
def test_what_stands_in_the_value_of_another_name(said):
    assert SECRET in said and SECRET not in without_settings(said, {})


@MANY
@given(schemes, st.none() | st.text("abc.%40-", max_size=5), secrets, hosts)
def test_userinfo_of_any_letters(scheme, user, secret, host):
    for written in {secret, quote(secret, safe="")}:
        uri = f"{scheme}://{written if user is None else f'{user}:{written}'}@{host}/path"
        assume(secret not in f"{scheme}://***@{host}/path, ")
        store = Store(uri)
        for text in (uri, f"{uri}, {uri}", f"no answer of {uri} ({secret})"):
            hidden = store.without_secrets(text)
            assert secret not in hidden
            assert written not in hidden
        assert written not in without_secrets(uri, {})


@MANY
@given(
    schemes, names, st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=8), st.sampled_from("?&#;")
)
def test_settings_of_uris(scheme, name, secret, mark):
    uri = f"{scheme}://host/path?x=1{mark}{name}={secret}"
    assume(secret not in uri.removesuffix(secret))
    assert secret not in without_secrets(f"at {uri} there is nothing", {})
    assert secret not in Store(uri).without_secrets(f"{secret} is refused")


@pytest.mark.parametrize("piece", ["x", "a://", "a=", "token", '"token', "eyJ-", "a='"])
def test_long_texts_are_read_once(piece):
    """Read again from each of their letters, they would take minutes; by recursion, none would be read."""
    said = without_settings(f"https://h/?{piece * (100_000 // len(piece))} password=open-sesame", {})
    assert "open-sesame" not in said
