"""The files under deploy/ parse, and agree with the Dockerfile and with each other."""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(p for p in DEPLOY.rglob("*") if p.suffix in {".yaml", ".yml"})
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = f"hoststage:{VERSION}"
PORT = 9477
SOCKETS = "/run/hoststage"
STORE = "/var/lib/hoststage"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def documents(path: Path) -> list[Any]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d is not None]


def pod(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod spec of one Kubernetes manifest and the daemon's container in it."""
    (document,) = documents(DEPLOY / "kubernetes" / name)
    spec = document["spec"] if document["kind"] == "Pod" else document["spec"]["template"]["spec"]
    (daemon,) = [c for c in spec["containers"] + spec["initContainers"] if c.get("args") == ["serve"]]
    return spec, daemon


def every_key(node: Any) -> set[str]:
    if isinstance(node, dict):
        return set(node) | {k for v in node.values() for k in every_key(v)}
    return {k for v in node for k in every_key(v)} if isinstance(node, list) else set()


def gibibytes(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(Gi|g)", quantity)
    assert match, f"write {quantity!r} in whole GiB"
    return int(match[1])


kubernetes = pytest.mark.parametrize("name", ["sidecar.yaml", "daemonset.yaml"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: str(p.relative_to(DEPLOY)))
def test_manifest_parses_to_mappings(path: Path) -> None:
    parsed = documents(path)
    assert parsed
    assert all(isinstance(d, dict) for d in parsed)


@kubernetes
def test_pod_runs_the_image_at_the_image_s_port_and_paths(name: str) -> None:
    spec, daemon = pod(name)
    assert daemon["image"] == IMAGE
    assert [p["containerPort"] for p in daemon["ports"]] == [PORT]
    mounts = {m["name"]: m["mountPath"] for m in daemon["volumeMounts"]}
    assert {SOCKETS, STORE} <= set(mounts.values())
    assert set(mounts) <= {v["name"] for v in spec["volumes"]}
    environment = {e["name"]: e["value"] for e in daemon["env"]}
    assert environment["HOSTSTAGE_HTTP_LISTEN"].endswith(f":{PORT}")


@kubernetes
def test_pod_probes_ask_the_named_port(name: str) -> None:
    _, daemon = pod(name)
    names = {p["name"] for p in daemon["ports"]}
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    for probe, path in paths.items():
        assert daemon[probe]["httpGet"]["path"] == path
        assert daemon[probe]["httpGet"]["port"] in names


@kubernetes
def test_daemon_has_no_privilege_and_a_memory_limit(name: str) -> None:
    spec, daemon = pod(name)
    assert not {"hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace", "privileged"} & every_key(spec)
    security = daemon["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    resources = daemon["resources"]
    assert gibibytes(resources["limits"]["memory"]) == gibibytes(resources["requests"]["memory"])


@kubernetes
def test_pod_runs_as_the_image_s_user(name: str) -> None:
    spec, daemon = pod(name)
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user
    assert daemon["securityContext"]["runAsUser"] == int(user[1])
    assert daemon["securityContext"]["runAsGroup"] == int(user[2])
    group = spec["securityContext"].get("fsGroup")
    chown = [c["command"][1] for c in spec["initContainers"] if c.get("command", [""])[0] == "chown"]
    assert group == int(user[2]) or chown == [f"{user[1]}:{user[2]}"]


def test_sidecar_outlives_its_worker_and_shares_only_the_sockets() -> None:
    spec, daemon = pod("sidecar.yaml")
    assert daemon["restartPolicy"] == "Always"
    (worker,) = spec["containers"]
    assert [m["mountPath"] for m in worker["volumeMounts"]] == [SOCKETS]
    (sockets,) = [v for v in spec["volumes"] if v["name"] == worker["volumeMounts"][0]["name"]]
    assert "emptyDir" in sockets


def test_daemonset_never_runs_two_daemons_on_a_node() -> None:
    (document,) = documents(DEPLOY / "kubernetes/daemonset.yaml")
    assert document["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
    labels = document["spec"]["template"]["metadata"]["labels"]
    assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_compose_agrees_with_the_image_and_with_prometheus() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    daemon = compose["services"]["hoststage"]
    assert daemon["image"] == IMAGE
    assert daemon["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    targets = {v.split(":")[1] for v in daemon["volumes"]}
    assert targets == {SOCKETS, STORE}
    assert gibibytes(daemon["mem_limit"]) == gibibytes(daemon["memswap_limit"])
    (scrape,) = documents(DEPLOY / "prometheus/prometheus.yml")
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"hoststage:{PORT}"]}]
    for volume in compose["services"]["prometheus"]["volumes"]:
        source = volume.split(":")[0]
        assert source in compose["volumes"] or (DEPLOY / source).is_file()


def test_kubernetes_scrape_keeps_the_port_that_the_pods_name() -> None:
    (scrape,) = documents(DEPLOY / "prometheus/kubernetes-scrape.yaml")
    rules = scrape["scrape_configs"][0]["relabel_configs"]
    (keep,) = [r for r in rules if r.get("action") == "keep"]
    for name in ("sidecar.yaml", "daemonset.yaml"):
        assert keep["regex"] in {p["name"] for p in pod(name)[1]["ports"]}


def test_every_stop_leaves_the_same_time_for_the_drain() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "systemd/hoststage.service").read_text())
    service = unit["Service"]
    (compose,) = documents(DEPLOY / "compose.yaml")
    grace = {pod(name)[0]["terminationGracePeriodSeconds"] for name in ("sidecar.yaml", "daemonset.yaml")}
    assert grace == {int(service["TimeoutStopSec"])}
    assert compose["services"]["hoststage"]["stop_grace_period"] == f"{service['TimeoutStopSec']}s"
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["RuntimeDirectory"] == SOCKETS.removeprefix("/run/")
    assert service["StateDirectory"] == STORE.removeprefix("/var/lib/")


def test_image_is_unprivileged_and_declares_what_the_manifests_use() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert [s[1] for s in stages] == ["builder", "runtime"]
    assert f'VOLUME ["{SOCKETS}", "{STORE}"]' in DOCKERFILE
    assert re.search(rf"^EXPOSE {PORT}$", DOCKERFILE, re.MULTILINE)
    assert re.search(r"^STOPSIGNAL SIGTERM$", DOCKERFILE, re.MULTILINE)
    assert 'CMD ["hoststage", "health"]' in DOCKERFILE
    assert 'ENTRYPOINT ["hoststage"]' in DOCKERFILE
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {s for c in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for s in c.split()}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
