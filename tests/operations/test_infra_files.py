"""Files for Grafana, Docker and Kubernetes: what can be checked of them without any of the three."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values, find_placeholders

from gyre_core.metrics_samples import cell_samples, prometheus_name, proxy_samples
from gyre_core.types import Outcome

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
KUBERNETES = sorted((INFRA / "k8s").glob("*.yaml"))


def known_metrics() -> set[str]:
    """What processes show: cell hosts, proxies, and every scalar that tasks write of a run."""
    cell = {"cell_id": "c", "state": "rollout", "epoch": 0, "policy_version": 0}
    engine = {"url": "u", "slots": 1, "busy": 0, "residents": 0, "version": 0, "rank": 0}
    names = {sample.name for sample in cell_samples(cell)}
    names |= {sample.name for sample in proxy_samples({"engines": [engine], "counters": {"calls_moved": 0}})}
    scalars = re.findall(r'"([a-z]+/[a-z_]+)"', (ROOT / "tasks" / "summary.py").read_text())
    scalars += [f"outcome/{outcome.value}_count" for outcome in Outcome]
    return names | {prometheus_name(name) for name in scalars} | {"gyre_step"}


def test_dashboard_is_what_its_code_makes_and_asks_only_for_metrics_that_exist() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", INFRA / "dashboards" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (INFRA / "dashboards" / "gyre.json").read_text()
    assert text == module.text(), "run python infra/dashboards/make.py"
    asked = set(re.findall(r"\bgyre_[a-z_]+", text + (INFRA / "dashboards" / "alerts.yaml").read_text()))
    assert len(asked) > 20 and asked <= known_metrics()
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_base_job_template_is_one_that_prefect_takes_and_every_variable_is_used() -> None:
    template = json.loads((INFRA / "k8s" / "base-job-template.json").read_text())
    WorkPoolCreate(name="gyre-runs", type="kubernetes", base_job_template=template)
    used = {placeholder.name for placeholder in find_placeholders(template["job_configuration"])}
    assert used == set(template["variables"]["properties"])


def rendered_job() -> dict[str, Any]:
    """The Job that Prefect's worker would make with every default."""
    template = json.loads((INFRA / "k8s" / "base-job-template.json").read_text())
    values = {
        name: entry["default"] for name, entry in template["variables"]["properties"].items() if "default" in entry
    }
    job = apply_values(template["job_configuration"]["job_manifest"], {**values, "name": "train"})
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 8
    limits |= {name: str(value) for name, value in limits.items()}  # Kubernetes takes numbers as quantities
    return job


def test_manifests_name_only_objects_that_are_there() -> None:
    objects = [item for path in KUBERNETES for item in yaml.safe_load_all(path.read_text())]
    made = {(item["kind"], item["metadata"]["name"]) for item in objects}
    text = json.dumps(objects) + json.dumps(rendered_job())
    accounts = set(re.findall(r'"serviceAccountName": "([^"]+)"', text))
    claims = set(re.findall(r'"claimName": "([^"]+)"', text))
    assert accounts == {"gyre-run", "gyre-worker"} and claims == {"gyre-runs"}
    assert {("ServiceAccount", name) for name in accounts} | {("PersistentVolumeClaim", "gyre-runs")} <= made
    assert len(made) == len(objects)


@pytest.mark.parametrize("path", [*KUBERNETES, None], ids=lambda path: path.name if path else "rendered job")
def test_manifests_follow_the_schema_of_kubernetes(path: Path | None) -> None:
    """Strict: unknown keys are refused. The package kubernetes-validate has the schemas."""
    items = [rendered_job()] if path is None else list(yaml.safe_load_all(path.read_text()))
    for item in items:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


def test_compose_file_has_the_settings_of_gyre_up_and_no_secret() -> None:
    from tasks.team import TEAM_SERVER_SETTINGS

    compose = yaml.safe_load((INFRA / "docker" / "compose.yaml").read_text())
    prefect = compose["services"]["prefect"]["environment"]
    assert TEAM_SERVER_SETTINGS.items() <= {name: str(value) for name, value in prefect.items()}.items()
    for service in compose["services"].values():
        for name, value in (service.get("environment") or {}).items():
            if "PASSWORD" in name or "KEY" in name:
                assert str(value).startswith("${"), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is open to the network"
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", [])]
    for mount in mounts:
        source = mount.split(":")[0]
        assert source in compose["volumes"] or (INFRA / "docker" / source).exists(), source
