"""Manifest: a training job as other programs start it, on the hosts of a cluster.

What is written runs the same command under torchrun on every host, the first one as the master:

    torchrun     a shell script, to be started on each host with the host's number or name
    kubernetes   a headless Service, and an Indexed Job for each kind of host
    skypilot     a task; all hosts have to be alike
    slurm        a batch script; hosts that are not alike are a heterogeneous job

Every host has to see the folder of the run.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal, TypeAlias

from penstock.cluster.cluster import Cluster, DeviceKind, Host
from penstock.errors import ClusterError
from penstock.files import Json
from penstock.units import GB

Kind: TypeAlias = Literal["torchrun", "kubernetes", "skypilot", "slurm"]
_PORT = 29400
_LONGEST = 40  # characters of a name, to which other programs add their own
_RESTARTS = 1000  # of a host that is taken away: as often as it may be
_GRACE_S = 30  # for which other programs wait after SIGTERM, unless they are told


@dataclass(frozen=True, slots=True)
class Launched:
    """What is started: `command` follows `torchrun -m penstock`, on all hosts of `cluster`.

    name:     of the job, for people.
    image:    a container that has Penstock and the job in it; for kubernetes.
    volume:   a claim of storage that all hosts see, at the folder `mount`; for kubernetes.
    pools:    of each host, PENSTOCK_POOL there, in a run that follows a policy; empty: not set.
    Raises:   ClusterError: a host has devices of several kinds.
    """

    name: str
    command: tuple[str, ...]
    cluster: Cluster
    image: str = ""
    volume: str = ""
    mount: str = "/runs"
    pools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for host in self.cluster.hosts:
            if len(host.named) > 1:
                message = f'host "{host.name}" has devices of {len(host.named)} kinds'
                hint = "describe them as several hosts: each is started for one kind of device"
                raise ClusterError(message, hint=hint)

    @property
    def label(self) -> str:
        """Return the name as other programs take it: small letters, digits and hyphens."""
        return label_of(self.name)

    @property
    def groups(self) -> list["HostGroup"]:
        """Return hosts that are alike and follow each other, as the ranks do."""
        hosts = self.cluster.hosts
        pools = dict(zip((host.name for host in hosts), self.pools, strict=False))
        alike = groupby(hosts, lambda h: (h.device, h.num_devices, h.cores, pools.get(h.name)))
        rows = [list(row) for _, row in alike]
        firsts = accumulate((len(row) for row in rows), initial=0)
        kinds = {kind.name: kind for kind in self.cluster.devices}
        return [
            HostGroup(first, tuple(row), kinds[row[0].device])
            for first, row in zip(firsts, rows, strict=False)
        ]

    def torchrun(self, node_rank: str, number: int, master: str) -> str:
        """Return the command of host `number`; `node_rank` and `master` are words of a shell."""
        per_host = self.cluster.hosts[number].num_devices
        own = f"env PENSTOCK_POOL={shlex.quote(self.pools[number])} " if self.pools else ""
        words = (
            f"{own}torchrun --nnodes={len(self.cluster.hosts)} --node-rank={node_rank}",
            f"--nproc-per-node={per_host} --master-addr={master} --master-port={_PORT}",
            f"-m penstock {shlex.join(self.command)}",
        )
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts that are alike: `first` is the number of the first of them."""

    first: int
    hosts: tuple[Host, ...]
    device: DeviceKind

    @property
    def host(self) -> Host:
        return self.hosts[0]

    @property
    def is_cpu(self) -> bool:
        """Return whether its ranks compute on cores."""
        return self.device.name.lower().startswith("cpu") or self.host.cores > 0

    @property
    def cores(self) -> int:
        """Return how many cores it computes on."""
        return self.host.cores or self.host.num_devices

    @property
    def grace_s(self) -> int:
        """Return for how many seconds its processes may end after SIGTERM."""
        return max(_GRACE_S, int(self.device.notice_s))


def label_of(text: str) -> str:
    """Return a text as a name of RFC 1123: small letters, digits and hyphens, at most 40."""
    words = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST].strip("-")
    return words if words[:1].isalpha() else f"job-{words}".strip("-")


def manifest(launched: Launched, kind: Kind) -> str:
    """Return the text that a program of this kind takes.

    Raises:   ClusterError: it lacks what that program needs.
    """
    match kind:
        case "torchrun":
            return _torchrun(launched)
        case "kubernetes":
            return _kubernetes(launched)
        case "skypilot":
            return _skypilot(launched)
        case "slurm":
            return _slurm(launched)


def _torchrun(launched: Launched) -> str:
    hosts = launched.cluster.hosts
    master = shlex.quote(hosts[0].name)
    lines = ["#!/bin/sh", f"# {launched.name}: on each host, `sh FILE HOST`.", 'case "$1" in']
    for number, host in enumerate(hosts):
        command = launched.torchrun(str(number), number, master)
        lines.append(f"  {shlex.quote(host.name)} | {number}) exec {command} ;;")
    names = " ".join(host.name for host in hosts)
    lines += [f"  *) echo {shlex.quote(f'give one of: {names}')} >&2; exit 2 ;;", "esac"]
    return "\n".join(lines) + "\n"


def _slurm(launched: Launched) -> str:
    groups = launched.groups
    parts = [_slurm_part(group) for group in groups]
    lines = ["#!/bin/bash", f"#SBATCH --job-name={launched.label}"]
    lines += ["#SBATCH --output=%x-%j.log", "#SBATCH --open-mode=append"]
    if any(group.device.preemptible for group in groups):
        grace_s = max(group.grace_s for group in groups)
        lines += ["#SBATCH --requeue", f"#SBATCH --signal=TERM@{grace_s}"]
    lines += "\n#SBATCH hetjob\n".join("\n".join(part) for part in parts).splitlines()
    nodes = "SLURM_JOB_NODELIST" if len(groups) == 1 else "SLURM_JOB_NODELIST_HET_GROUP_0"
    lines += ["", f'master=$(scontrol show hostnames "${nodes}" | head -n 1)', "export master"]
    steps: list[str] = []
    for number, group in enumerate(groups):
        node = "$SLURM_NODEID" if not group.first else f"$(({group.first} + SLURM_NODEID))"
        run = launched.torchrun(node, group.first, '"$master"')
        het = f"--het-group={number} " if len(groups) > 1 else ""
        steps.append(f"{het}bash -c {shlex.quote(run)}")
    return "\n".join(lines) + f"\nsrun {' : '.join(steps)}\n"


def _slurm_part(group: HostGroup) -> list[str]:
    lines = [f"#SBATCH --nodes={len(group.hosts)}", "#SBATCH --ntasks-per-node=1"]
    if group.is_cpu:
        return [*lines, f"#SBATCH --cpus-per-task={group.cores}"]
    device = f"{label_of(group.device.name)}:{group.host.num_devices}"
    return [*lines, f"#SBATCH --gpus-per-node={device}"]


def _skypilot(launched: Launched) -> str:
    groups = launched.groups
    if len({(g.device.name, g.host.num_devices, g.host.cores) for g in groups}) > 1:
        names = ", ".join(f'"{group.host.name}"' for group in groups)
        hint = "leave hosts of one kind in the cluster, or print kubernetes or slurm"
        raise ClusterError(f"a SkyPilot task has hosts of one kind; {names} are not", hint=hint)
    (group, *_), hosts = groups, launched.cluster.hosts
    resources: dict[str, Json] = {"use_spot": group.device.preemptible}
    if group.is_cpu:
        memory = group.device.memory_bytes * (1 if group.host.cores else group.host.num_devices)
        resources |= {"cpus": f"{group.cores}+", "memory": f"{max(1, memory // GB)}+"}
    else:
        resources["accelerators"] = f"{group.device.name.upper()}:{group.host.num_devices}"
    master = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    run = launched.torchrun("$SKYPILOT_NODE_RANK", group.first, master)
    task: dict[str, Json] = {"name": launched.label, "num_nodes": len(hosts)}
    return yaml({**task, "workdir": ".", "resources": resources, "run": f"{run}\n"})


def _kubernetes(launched: Launched) -> str:
    if not launched.image:
        hint = "give an image, REGISTRY/NAME:TAG: a container that has Penstock and the job in it"
        raise ClusterError("kubernetes runs containers, and no image is named", hint=hint)
    if len(launched.cluster.hosts) > 1 and not launched.volume:
        hint = "give a volume, CLAIM: a PersistentVolumeClaim (ReadWriteMany) that all hosts see"
        raise ClusterError("several hosts write one folder, and no volume is named", hint=hint)
    name = launched.label
    service: dict[str, Json] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"penstock/job": name},
            "ports": [{"name": "rendezvous", "port": _PORT}],
        },
    }
    jobs = [
        _kubernetes_job(launched, number, group) for number, group in enumerate(launched.groups)
    ]
    return "---\n".join(yaml(each) for each in (service, *jobs))


def _kubernetes_job(launched: Launched, number: int, group: HostGroup) -> dict[str, Json]:
    name, count = f"{launched.label}-{number}", len(group.hosts)
    pod: dict[str, Json] = {
        "subdomain": launched.label,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": group.grace_s,
        "containers": [_container(launched, group)],
        "volumes": _volumes(launched),
    }
    if not group.is_cpu:
        pod["nodeSelector"] = {"penstock/device": label_of(group.device.name)}
    spec: dict[str, Json] = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": _RESTARTS if group.device.preemptible else 0,
        "template": {"metadata": {"labels": {"penstock/job": launched.label}}, "spec": pod},
    }
    if group.device.preemptible:
        lost: Json = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
        spec["podFailurePolicy"] = {"rules": [lost]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _container(launched: Launched, group: HostGroup) -> Json:
    node = "$JOB_COMPLETION_INDEX"
    node = f"$(({group.first} + JOB_COMPLETION_INDEX))" if group.first else node
    master = f"{launched.label}-0-0.{launched.label}"
    run = launched.torchrun(node, group.first, master)
    asked: dict[str, Json] = {"nvidia.com/gpu": group.host.num_devices}
    if group.is_cpu:
        asked = {"cpu": group.cores}
    mounts: list[Json] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if launched.volume:
        mounts.append({"name": "runs", "mountPath": launched.mount})
    return {
        "name": "train",
        "image": launched.image,
        "command": ["sh", "-c", f"exec {run}"],
        "resources": {"requests": asked, "limits": asked},
        "volumeMounts": mounts,
    }


def _volumes(launched: Launched) -> list[Json]:
    shared: Json = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    claim: Json = {"claimName": launched.volume}
    return (
        [shared, {"name": "runs", "persistentVolumeClaim": claim}] if launched.volume else [shared]
    )


# -- YAML -----------------------------------------------------------------------------------------


def yaml(document: Mapping[str, Json]) -> str:
    """Return a document as YAML; every text is quoted."""
    return "".join(f"{line}\n" for line in _lines(dict(document)))


def _lines(value: Json) -> list[str]:
    match value:
        case dict() if value:
            return [line for key, each in value.items() for line in _entry(f"{key}:", each)]
        case list() if value:
            return [line for each in value for line in _item(each)]
        case _:
            return [_scalar(value)]


def _entry(head: str, value: Json) -> list[str]:
    if isinstance(value, dict | list) and value:
        return [head, *(f"  {line}" for line in _lines(value))]
    return [f"{head} {_scalar(value)}"]


def _scalar(value: Json) -> str:
    """Return what is empty, a number or a text, in quotes with the escapes that YAML knows."""
    if not isinstance(value, str):
        return json.dumps(value)
    marks = {'"': '\\"', "\\": "\\\\", "\n": "\\n"}
    shown = (each if " " <= each <= "~" else f"\\U{ord(each):08x}" for each in value)
    return f'"{"".join(marks.get(each, code) for each, code in zip(value, shown, strict=True))}"'


def _item(value: Json) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]
