"""The Grafana dashboard: a model that is sound, and expressions that are valid and ask for figures that exist."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.metrics_core import Metric

from appliance.management.jobs import JobEntry
from appliance.management.metrics import ManagementCollector
from appliance.management.service import ManagementState
from waferbox import roles
from waferbox.runtime.metrics import RoleCollector
from wsc.v1 import management_pb2
from wsc.v1.observation_pb2 import JobEvent, NodeReport, Scalar

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/waferbox.json").read_text())
PANELS = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SERVICES = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]
REPORT = NodeReport(
    node="wafer-0", step=12, seconds={"compute": 1.5}, bytes={"received": 4096}, queued={"received": 2}, time=1.0
)


def selectors(expression: Any) -> Iterator[Any]:
    """All in it that name a metric."""
    match expression:
        case promql_parser.VectorSelector():
            yield expression
        case promql_parser.MatrixSelector():
            yield expression.vector_selector
        case promql_parser.Call():
            yield from itertools.chain.from_iterable(map(selectors, expression.args))
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            yield from selectors(expression.expr)
        case promql_parser.BinaryExpr():
            yield from (*selectors(expression.lhs), *selectors(expression.rhs))
        case _:
            raise AssertionError(f"{type(expression)} is not known here")


@pytest.fixture(scope="module")
def exported() -> dict[str, list[dict[str, str]]]:
    """The labels of each sample that a role or management exports, by its name."""
    job = JobEntry(name="job-1", request=management_pb2.CreateJobRequest(), token="", created=0.0)
    job.history.add([JobEvent(report=REPORT), JobEvent(scalar=Scalar(name="loss", step=12, value=0.5))])
    collect: tuple[Callable[[], Iterator[Metric]], ...] = (
        RoleCollector("wafer", lambda: REPORT).collect,
        ManagementCollector(lambda: ManagementState(nodes=(), jobs=[job])).collect,
    )
    found: dict[str, list[dict[str, str]]] = {name: [{"role": "wafer"}] for name in PROCESS}
    for metric in itertools.chain.from_iterable(one() for one in collect):
        for sample in metric.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


PROCESS = ("process_resident_memory_bytes", "process_cpu_seconds_total")  # of the official library, for each process


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_what_is_exported(expression: str, exported: dict[str, list[dict[str, str]]]) -> None:
    asked = list(selectors(promql_parser.parse(expression)))
    assert asked
    for selector in asked:
        matchers = {matcher.name: matcher for matcher in selector.matchers.matchers}
        job = matchers.pop("job")  # which every selector has, so that a panel shows the chosen targets alone
        assert (job.op, job.value) == (promql_parser.MatchOp.Re, "$job")
        assert matchers.keys() <= exported[selector.name][-1].keys()
        if "role" in matchers:
            assert matchers.pop("role").value in roles.BY_NAME
        for name, matcher in matchers.items():
            values = {labels[name] for labels in exported[selector.name]}
            for value in matcher.value.split("|"):
                assert value in values
        assert selector.name in exported


def test_what_does_not_parse_is_noticed() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("avg by (part) (rate(waferbox_steps_total[30s])")


def test_a_legend_names_labels_that_are_there(exported: dict[str, list[dict[str, str]]]) -> None:
    of_target = {"instance"}  # Prometheus adds it
    for target in itertools.chain.from_iterable(panel["targets"] for panel in PANELS):
        (selector,) = selectors(promql_parser.parse(target["expr"]))
        grouped = re.search(r"by \((.*?)\)", target["expr"])
        there = set(exported[selector.name][-1]) | of_target
        if grouped:
            assert set(grouped[1].split(", ")) <= there
            there = set(grouped[1].split(", "))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= there


def test_the_model_is_sound() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in PANELS)
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)  # none lies on another
    assert {column for column, _ in cells} == set(range(24))  # the width that Grafana has
    assert len(cells) == 24 * (1 + max(row for _, row in cells))  # and no hole


def test_a_role_has_one_name_of_a_label_and_one_value(exported: dict[str, list[dict[str, str]]]) -> None:
    for label, value in itertools.chain.from_iterable(labels.items() for labels in itertools.chain(*exported.values())):
        assert (label == "role") == (value in roles.BY_NAME)


def test_source_and_targets_are_variables() -> None:
    source, job = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert (job["name"], job["type"], job["allValue"]) == ("job", "query", ".+")
    assert job["query"]["query"] == job["definition"] == 'label_values({__name__=~"waferbox_.+"}, job)'
    asked = [job, *PANELS, *itertools.chain.from_iterable(panel["targets"] for panel in PANELS)]
    assert all(one["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for one in asked)


def test_a_source_is_provisioned() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    (folder,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/waferbox.yml").read_text())["providers"]
    mounts = dict(volume.split(":")[1::-1] for volume in SERVICES["grafana"]["volumes"])
    assert mounts[folder["options"]["path"]] == "./deploy/grafana/dashboards"


def test_prometheus_asks_every_service_that_serves_figures() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    (asked,) = job["dns_sd_configs"]
    ports = {
        name: service["command"][service["command"].index("--metrics-port") + 1]
        for name, service in SERVICES.items()
        if "--metrics-port" in service.get("command", ())
    }
    assert set(asked["names"]) == set(ports)
    assert set(ports.values()) == {str(asked["port"])}
