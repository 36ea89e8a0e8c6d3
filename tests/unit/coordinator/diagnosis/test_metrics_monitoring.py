"""The alert rules and the dashboard of the documentation are valid, and ask for nothing that is not exported."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.diagnosis.metrics.families import families_of
from coordinator.diagnosis.metrics.totals import Reading
from tests.probes import requires

FOLDER = Path(__file__).parents[4] / "docs" / "monitoring"
ALERTS = FOLDER / "alerts.yml"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
# Prometheus adds it to each series: the exporter's address.
TARGET_LABELS = {"instance"}
OPERATORS = {"and", "or", "unless"}


def exported() -> tuple[set[str], set[str]]:
    """Names of series, and of their labels."""
    names, labels = set(), {"le"} | TARGET_LABELS
    for family in families_of(Reading({}, {}, {}, {}, {}, 0, 0)):
        labels |= set(family.labels)
        if family.kind == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(family.name)
    return names, labels


NAMES, LABELS = exported()


def asked_for(expression: str) -> tuple[set[str], set[str]]:
    """Names of series and labels in an expression of PromQL."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    labels = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*""', plain))
    for listed in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", plain):
        labels |= set(re.findall(r"\w+", listed))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", plain)
    words = re.findall(r"([A-Za-z_:][\w:]*)\s*(\(?)", bare)
    return {word for word, bracket in words if not bracket} - OPERATORS, labels


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def targets() -> Iterator[tuple[str, str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def test_the_parts_of_an_expression_are_found() -> None:
    """Otherwise the tests below could not fail."""
    assert asked_for(
        'sum by (le, x) (rate(a_bucket{b="c(d)",e=~"f"}[5m])) / on (g) h > 1 and absent(i) >= 2'
    ) == (
        {"a_bucket", "h", "i"},
        {"le", "x", "b", "e", "g"},
    )


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported(rule: dict[str, Any]) -> None:
    """It has a severity, says in words what to do, and its words use labels that there are."""
    names, labels = asked_for(rule["expr"])
    assert names
    assert names <= NAMES
    assert labels <= LABELS
    assert rule["labels"]["severity"] in ("critical", "warning")
    texts = [rule["annotations"][each] for each in ("summary", "description")]
    assert {label for text in texts for label in re.findall(r"\$labels\.(\w+)", text)} <= LABELS


@requires("promtool")
def test_promtool_accepts_the_rules() -> None:
    """It reads them as Prometheus does."""
    outcome = subprocess.run(
        ["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False, timeout=60
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


CALL = 'rank="1",group="tp:0",plane="shared",op="all_reduce",instance="host"'
ILL = {
    'group_usable{rank="1",group="tp:0",instance="host"}': "0x30",
    f'errors_total{{{CALL},error="disagreed"}}': "0+1x30",
    f'errors_total{{{CALL},error="failed"}}': "0+1x30",
    f"inflight_seconds{{{CALL}}}": "0+60x30",
    f"calls_total{{{CALL}}}": "0+600x30",
    f"last_arrivals_total{{{CALL}}}": "0+400x30",
    f"late_seconds_total{{{CALL}}}": "0+12x30",
    'queue_lag_messages{rank="0",group="tp:0",reader="1",instance="host"}': "200x30",
    'processes{instance="host"}': "0x30",
    'undecodable_pages{instance="host"}': "1x30",
}
# A worker that waits for work, a rank that is often last by little, and one that is late but rarely.
WELL = {
    'group_usable{rank="1",group="tp:0",instance="host"}': "1x30",
    f'errors_total{{{CALL},error="disagreed"}}': "0x30",
    f'errors_total{{{CALL},error="failed"}}': "3x30",
    f"inflight_seconds{{{CALL}}}": "5x30",
    f"inflight_seconds{{{CALL.replace('all_reduce', 'broadcast_object')}}}": "0+60x30",
    f"inflight_seconds{{{CALL.replace('all_reduce', 'recv_tensor_dict')}}}": "0+60x30",
    f"calls_total{{{CALL}}}": "0+600x30",
    f"last_arrivals_total{{{CALL}}}": "0+500x30",
    f"late_seconds_total{{{CALL}}}": "0+1x30",
    f"calls_total{{{CALL.replace('shared', 'host')}}}": "0+600x30",
    f"last_arrivals_total{{{CALL.replace('shared', 'host')}}}": "0+100x30",
    f"late_seconds_total{{{CALL.replace('shared', 'host')}}}": "0+12x30",
    'queue_lag_messages{rank="0",group="tp:0",reader="1",instance="host"}': "3x30",
    'processes{instance="host"}': "4x30",
    'undecodable_pages{instance="host"}': "0x30",
    'build_info{version="1",instance="host"}': "1x30",
}


@requires("promtool")
@pytest.mark.parametrize(
    ("series", "fire"), [(ILL, sorted(rule["alert"] for rule in rules())), (WELL, [])], ids=["ill", "well"]
)
def test_alerts_fire_where_they_should(tmp_path: Path, series: dict[str, str], fire: list[str]) -> None:
    """Each alert fires in a deployment where all is wrong, and none in one that is well and partly idle."""
    firing = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "25m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fire],
    }
    test = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": f"group_coordinator_{name}", "values": values}
                    for name, values in series.items()
                ],
                "promql_expr_test": [firing],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    outcome = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.parametrize(("title", "expression", "legend"), list(targets()))
def test_a_panel_asks_for_what_is_exported(title: str, expression: str, legend: str) -> None:
    """Its legend shows labels that the expression leaves."""
    names, labels = asked_for(expression)
    assert names, title
    assert names <= NAMES
    assert labels <= LABELS
    kept = re.search(r"\bby \(([^)]*)\)", expression)
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert shown <= (set(re.findall(r"\w+", kept[1])) if kept else LABELS)


def test_every_metric_is_in_a_panel_or_an_alert() -> None:
    """What nobody looks at need not be exported."""
    expressions = [rule["expr"] for rule in rules()] + [expression for _, expression, _ in targets()]
    used = set().union(*(asked_for(each)[0] for each in expressions))
    of_histogram = {f"group_coordinator_wait_seconds_{part}" for part in ("sum", "count")}
    assert NAMES - of_histogram == used


def test_the_dashboard_can_be_imported() -> None:
    """It has what Grafana asks for: a title, a uid, panels with places of their own, and data from a variable."""
    assert DASHBOARD["title"]
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD  # Grafana gives one
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for variable in variables.values():
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            assert name in NAMES
            assert label in LABELS
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    sources = [part["datasource"] for panel in panels for part in (panel, *panel["targets"])]
    sources += [each["datasource"] for each in variables.values() if each["type"] == "query"]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == set(variables)


def test_no_two_panels_share_a_place() -> None:
    """The grid has 24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        x, y, w, h = (panel["gridPos"][each] for each in ("x", "y", "w", "h"))
        assert 0 <= x < x + w <= 24
        cells = {(column, row) for column in range(x, x + w) for row in range(y, y + h)}
        assert not cells & taken, panel["title"]
        taken |= cells
