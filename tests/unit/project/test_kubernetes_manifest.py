"""The manifest for Kubernetes is what the LeaderWorkerSet controller takes, and what our settings and `lws://` take."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from coordinator.launchers.lws import DEFAULT_PORT
from coordinator.settings import CoordinatorSettings
from examples.pod_worker import INIT_METHOD

ROOT = Path(__file__).parents[3]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "examples/kubernetes/leader_worker_set.yaml").read_text())
SCHEMA = json.loads(Path(__file__).with_name("leader_worker_set_schema.json").read_text())
TEMPLATE = ("spec", "leaderWorkerTemplate")
POD = (*TEMPLATE, "workerTemplate", "spec")
CONTAINER = (*POD, "containers", 0)


def at(path: tuple[str | int, ...]) -> Any:
    found: Any = MANIFEST
    for key in path:
        found = found[key]
    return found


def changed(path: tuple[str | int, ...], name: str, value: Any) -> dict[str, Any]:
    """Return the manifest with another value, or without the field if `value` is None."""
    manifest = copy.deepcopy(MANIFEST)
    found: Any = manifest
    for key in path:
        found = found[key]
    found.pop(name, None)
    if value is not None:
        found[name] = value
    return manifest


def test_the_manifest_fits_the_schema_of_the_controller() -> None:
    """Names, types and choices are those of its custom resource definition."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(MANIFEST, SCHEMA)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ((), "kind", "StatefulSet"),
        ((), "apiVersion", "v1"),
        (("metadata",), "name", "My_Engine"),
        (("spec",), "replica", 2),
        (("spec",), "startupPolicy", "Later"),
        (TEMPLATE, "size", "2"),
        (TEMPLATE, "restartPolicy", "Always"),
        (TEMPLATE, "workerTemplate", None),
        (POD, "containers", None),
        (CONTAINER, "commands", ["python"]),
        (CONTAINER, "command", "python"),
        ((*CONTAINER, "env", 0), "value", 600),
        ((*CONTAINER, "ports", 0), "containerPort", "29500"),
        ((*CONTAINER, "volumeMounts", 0), "mountPath", None),
        ((*POD, "volumes", 0), "emptydir", {}),
        ((*POD, "volumes", 0, "emptyDir"), "size", "1Gi"),
    ],
)
def test_the_schema_finds_mistakes(path: tuple[str | int, ...], name: str, value: Any) -> None:
    """A misspelt field, a wrong type, an unknown choice and a missing field are each refused."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(path, name, value), SCHEMA)


def test_the_variables_are_settings_of_ours() -> None:
    """A misspelt one would end every rank."""
    environ = {each["name"]: each["value"] for each in at((*CONTAINER, "env"))}
    settings = CoordinatorSettings.from_env(environ)
    assert settings.create_timeout_s == 600.0
    assert settings.remote_port_range == (29600, 29699)


def test_the_ports_of_the_store_and_of_gloo_do_not_meet() -> None:
    """The store has the port of the init method, which the kernel gives to nobody who asks for any."""
    assert [each["containerPort"] for each in at((*CONTAINER, "ports"))] == [DEFAULT_PORT]
    assert INIT_METHOD.endswith(f":{DEFAULT_PORT}")
    sysctls = {each["name"]: each["value"] for each in at((*POD, "securityContext", "sysctls"))}
    first, last = map(int, sysctls["net.ipv4.ip_local_port_range"].split())
    assert not first <= DEFAULT_PORT <= last
    assert last - first >= 500


def test_every_gpu_has_a_rank() -> None:
    """The program starts as many ranks as the pod has devices."""
    command = at((*CONTAINER, "command"))
    assert command[:3] == ["python", "-m", "examples.pod_worker"]
    assert (
        command[command.index("--processes") + 1] == at((*CONTAINER, "resources", "limits"))["nvidia.com/gpu"]
    )


def test_the_ranks_of_a_pod_have_room_in_dev_shm() -> None:
    """NCCL needs it for eight GPUs: the 64 MiB of a container may not do. It is memory, and the pod may use so much."""
    (mount,) = at((*CONTAINER, "volumeMounts"))
    (volume,) = at((*POD, "volumes"))
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"}
    assert volume["emptyDir"]["medium"] == "Memory"
    room, memory = volume["emptyDir"]["sizeLimit"], at((*CONTAINER, "resources", "limits"))["memory"]
    assert room.endswith("Gi")
    assert 1 <= int(room.removesuffix("Gi")) < int(memory.removesuffix("Gi"))
