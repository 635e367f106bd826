"""A real Prometheus asks a cluster that it hears of from the page, and every panel of the dashboard shows something."""

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cluster_rig import SCRIPTS, StartCluster, StartScript, wait_for

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
DEPLOY = Path(__file__).parents[2] / "deploy"
END_SECONDS = 10.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason="no prometheus here: Debian has a package of it"),
]


def unused_address() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


def ask(address: str, what: str, **arguments: str) -> Any:
    try:
        with urllib.request.urlopen(
            f"http://{address}/api/v1/{what}?{urllib.parse.urlencode(arguments)}", timeout=5.0
        ) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{arguments}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return None  # it is not up yet


def test_the_configuration_is_valid() -> None:
    # The syntax alone: the token is a file of the container.
    command = [str(PROMTOOL), "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_panel_has_something_to_show(
    start_script: StartScript, tmp_path: Path, start_cluster: StartCluster, request: pytest.FixtureRequest
) -> None:
    with start_cluster(tmp_path / "cluster", "--page", "127.0.0.1:0", "--metrics", wafers=2, workers=2) as cluster:
        found = {"url": f"{cluster.page}targets", "refresh_interval": "200ms"}
        asking: dict[str, Any] = {"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"}}
        asking["scrape_configs"] = [{"job_name": "waferbox", "http_sd_configs": [found]}]
        configuration = tmp_path / "prometheus.yml"
        configuration.write_text(json.dumps(asking))  # JSON is YAML
        prometheus = unused_address()
        places = ["--storage.tsdb.path", str(tmp_path / "data"), "--web.listen-address", prometheus]
        with (tmp_path / "prometheus.log").open("wb") as log:
            command = [str(PROMETHEUS), "--config.file", str(configuration), *places]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        request.addfinalizer(lambda: process.wait(END_SECONDS))
        request.addfinalizer(process.terminate)
        arguments = ("runs", "--artifacts", tmp_path / "artifacts", "--num-csx", 2, "--num-steps", 1_000_000)
        script = start_script(SCRIPTS / "faults.py", *arguments, management=cluster.management)
        script.wait_for_output("step 50\n")

        targets = [
            (panel["title"], target)
            for panel in json.loads((DEPLOY / "grafana/dashboards/waferbox.json").read_text())["panels"]
            for target in panel["targets"]
        ]
        shown: dict[str, list[dict[str, str]]] = {}

        def all_shown() -> bool:
            for title, target in targets:
                answer = ask(prometheus, "query", query=target["expr"].replace("$job", "waferbox"))
                if not answer or not answer["result"]:
                    return False
                shown[f"{title}: {target['expr']}"] = [series["metric"] for series in answer["result"]]
            return True

        wait_for(all_shown, 30.0, lambda: f"nothing beyond {shown}\n{(tmp_path / 'prometheus.log').read_text()}")
        for (_, target), series in zip(targets, shown.values(), strict=True):
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            legends = [tuple(metric[label] for label in sorted(labels)) for metric in series]
            assert len(set(legends)) == len(legends)  # two curves of one name could not be told apart
        health = [target["health"] for target in ask(prometheus, "targets")["activeTargets"]]
        assert health == ["up"] * (1 + len(cluster.nodes()))
        # Every series has the role of its process, or of what it counts, under one name.
        everything = ask(prometheus, "query", query='{__name__=~"waferbox_running|process_.+"}')["result"]
        assert {series["metric"]["role"] for series in everything} == {
            *("management", "memoryx", "swarmx", "wafer", "worker")
        }
        assert not any("exported_role" in series["metric"] for series in everything)
        # The query of the dashboard's variable.
        assert ask(prometheus, "label/job/values", **{"match[]": '{__name__=~"waferbox_.+"}'}) == ["waferbox"]
        script.close()
