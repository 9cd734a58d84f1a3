"""What `penstock launch` prints is what the programs themselves accept, and starts every rank."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from penstock.cli import main
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ClusterError
from penstock.fleet.policy_file import PolicyFile
from penstock.manifest import Launched, label_of, manifest, yaml

A100 = DeviceKind("a100", 40 * 2**30, (("float32", 19.5e12),), 1.5e12)
T4 = DeviceKind("t4", 16 * 2**30, (("float32", 8e12),), 3e11, preemptible=True, notice_s=120.0)
CPU = DeviceKind("cpu", 8 * 2**30, (("float32", 1e11),), 2e10)
LINK = Link(1e-5, 1e9)
COMMAND = ("train", "jobs/a b.py:small", "--out", "/shared/it's", "--resume")


def cluster(*hosts: Host) -> Cluster:
    return Cluster((A100, T4, CPU), hosts, LINK, LINK, LINK)


def launched(*hosts: Host, command=COMMAND, **more) -> Launched:
    return Launched("A Job, of 1", command, cluster(*hosts), **more)


ALIKE = Host("n-0", "t4", 2), Host("n-1", "t4", 2), Host("n-2", "t4", 2)
MIXED = Host("big", "a100", 4), Host("s-0", "t4", 1), Host("s-1", "t4", 1)
CORES = Host("c-0", "cpu", 2, cores=2), Host("c-1", "cpu", 2, cores=2)
FLEETS = [ALIKE, MIXED, CORES, (MIXED[0],)]


def words_of(script: str, setting: str = "") -> list[list[str]]:
    """Return the words that torchrun is given, as a shell makes them of a script."""
    shown = 'torchrun() { printf "%s\\0" "$@"; echo; }\n'
    shell = ["bash", "-c", shown + setting + script.replace("exec ", "")]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    return [line.split("\0")[:-1] for line in done.stdout.splitlines()]


def torchrun_takes(words: list[str]):
    """Return what torchrun's own parser makes of words."""
    return get_args_parser().parse_args(words)


def check_starts(found, host: Host, number: int, hosts: tuple[Host, ...], command=COMMAND) -> None:
    asked = torchrun_takes(found)
    assert (asked.nnodes, asked.nproc_per_node) == (str(len(hosts)), str(host.num_devices))
    assert (asked.node_rank, asked.module) == (number, True)
    assert (asked.training_script, tuple(asked.training_script_args)) == ("penstock", command)


@pytest.mark.parametrize("hosts", FLEETS)
def test_a_script_starts_the_ranks_of_each_host_by_its_name_or_number(hosts):
    text = manifest(launched(*hosts), "torchrun")
    for number, host in enumerate(hosts):
        for word in (host.name, str(number)):
            (found,) = words_of(text, f"set -- {word}\n")
            check_starts(found, host, number, hosts)
            assert torchrun_takes(found).master_addr == hosts[0].name
    other = subprocess.run(["sh", "-c", text, "sh", "x"], capture_output=True, text=True)
    assert other.returncode == 2
    assert hosts[0].name in other.stderr


# -- slurm ----------------------------------------------------------------------------------------

OPTIONS = {  # of sbatch(1), Slurm 22.05 and later
    "job-name", "output", "open-mode", "requeue", "signal", "nodes", "ntasks-per-node",
    "cpus-per-task", "gpus-per-node",
}  # fmt: skip


@pytest.mark.parametrize("hosts", FLEETS)
def test_a_batch_script_is_a_shells_and_has_options_of_sbatch(hosts, tmp_path):
    text = manifest(launched(*hosts), "slurm")
    (tmp_path / "job").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "job"]).returncode == 0
    head, _, _ = text.partition("\n\n")
    first, *lines = head.splitlines()
    assert first == "#!/bin/bash"
    options = [re.fullmatch(r"#SBATCH (?:--([a-z-]+)(?:=\S+)?|hetjob)", line) for line in lines]
    assert all(options)
    assert {found[1] for found in options} <= OPTIONS | {None}
    is_taken = any(host.device == "t4" for host in hosts)
    assert ("--requeue" in text, "--signal=TERM@120" in text) == (is_taken, is_taken)


@pytest.mark.parametrize("hosts", FLEETS)
def test_a_batch_script_starts_the_ranks_of_every_node(hosts, tmp_path):
    """By a stand-in for srun, which runs each part on its nodes, as Slurm numbers them."""
    text = manifest(launched(*hosts), "slurm")
    counts = [int(n) for n in re.findall(r"--nodes=(\d+)", text)]
    assert sum(counts) == len(hosts)
    stand_in = """
    scontrol() { echo HEAD; echo other; }
    srun() {
      local group=0 words=()
      for word in "$@" :; do
        case "$word" in
          --het-group=*) ;;
          :) for ((n = 0; n < counts[group]; n++)); do SLURM_NODEID=$n "${words[@]}"; done
             group=$((group + 1)); words=() ;;
          *) words+=("$word") ;;
        esac
      done
    }
    export -f torchrun
    """
    found = words_of(text, f"counts=({' '.join(map(str, counts))})\n{stand_in}")
    for number, (words, host) in enumerate(zip(found, hosts, strict=True)):
        check_starts(words, host, number, hosts)
        assert torchrun_takes(words).master_addr == "HEAD"


# -- skypilot -------------------------------------------------------------------------------------


def parsed(text: str):
    return list(pytest.importorskip("yaml", reason="PyYAML is not here").safe_load_all(text))


@pytest.mark.parametrize("hosts", [ALIKE, CORES])
def test_a_task_starts_the_ranks_of_every_node(hosts):
    (task,) = parsed(manifest(launched(*hosts), "skypilot"))
    assert (task["name"], task["num_nodes"]) == ("a-job-of-1", len(hosts))
    resources = task["resources"]
    if hosts is ALIKE:
        assert resources == {"use_spot": True, "accelerators": "T4:2"}
    else:
        assert resources == {"use_spot": False, "cpus": "2+", "memory": "8+"}
    for number, host in enumerate(hosts):
        setting = f"SKYPILOT_NODE_RANK={number}\nSKYPILOT_NODE_IPS=$'1.1.1.1\\n2.2.2.2'\n"
        (found,) = words_of(task["run"], setting)
        check_starts(found, host, number, hosts)
        assert torchrun_takes(found).master_addr == "1.1.1.1"


@pytest.mark.parametrize("hosts", [ALIKE, CORES])
def test_a_task_is_what_skypilot_itself_accepts(hosts):
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    (task,) = parsed(manifest(launched(*hosts), "skypilot"))
    assert sky.Task.from_yaml_config(task).num_nodes == len(hosts)


def test_hosts_that_are_not_alike_are_no_task():
    with pytest.raises(ClusterError, match='"big", "s-0" are not'):
        manifest(launched(*MIXED), "skypilot")


# -- kubernetes -----------------------------------------------------------------------------------


def pods(documents) -> list[tuple[dict, dict]]:
    """Return the container and the variables of each pod, in the order of its jobs' indices."""
    jobs = [each for each in documents if each["kind"] == "Job"]
    return [
        (job["spec"]["template"]["spec"], {"JOB_COMPLETION_INDEX": str(index)})
        for job in jobs
        for index in range(job["spec"]["completions"])
    ]


@pytest.mark.parametrize("hosts", FLEETS)
def test_pods_start_the_ranks_of_every_host(hosts):
    """The master is the first pod of the first job, under the name that the service gives it."""
    text = manifest(launched(*hosts, image="a/b:1", volume="claim"), "kubernetes")
    service, *jobs = parsed(text)
    for number, ((pod, settings), host) in enumerate(zip(pods(jobs), hosts, strict=True)):
        (container,) = pod["containers"]
        setting = "".join(f"{name}={value}\n" for name, value in settings.items())
        (found,) = words_of(container["command"][2], setting)
        check_starts(found, host, number, hosts)
        master = torchrun_takes(found).master_addr
        assert master == f"{jobs[0]['metadata']['name']}-0.{service['metadata']['name']}"
        assert pod["subdomain"] == service["metadata"]["name"]
        asked = container["resources"]["limits"]
        assert asked == (
            {"cpu": 2} if host.device == "cpu" else {"nvidia.com/gpu": host.num_devices}
        )
        taken = host.device == "t4"
        assert pod["terminationGracePeriodSeconds"] == (120 if taken else 30)
    for job in jobs:
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize("hosts", FLEETS)
def test_a_manifest_is_what_kubernetes_itself_accepts(hosts):
    """By the schemas that Kubernetes publishes."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not here")
    text = manifest(launched(*hosts, image="a/b:1", volume="claim"), "kubernetes")
    for document in parsed(text):
        validate.validate(document, validate.latest_version(), strict=True)


def test_what_kubernetes_needs_is_asked_for():
    with pytest.raises(ClusterError, match="no image is named"):
        manifest(launched(*ALIKE), "kubernetes")
    with pytest.raises(ClusterError, match="no volume is named"):
        manifest(launched(*ALIKE, image="a/b:1"), "kubernetes")


# -- texts ----------------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers() | st.text()
documents = st.dictionaries(
    st.from_regex(r"[a-zA-Z]{3,8}[/.]?[a-z]{3,5}", fullmatch=True).filter(
        lambda key: key.lower() not in ("null", "true", "false")
    ),
    st.recursive(
        plain,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.from_regex(r"key[A-Z]{1,3}", fullmatch=True), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(document=documents)
def test_yaml_is_read_as_what_was_written(document):
    assert parsed(yaml(document)) == [document]


@given(text=st.text(max_size=80))
def test_names_are_those_of_rfc_1123(text):
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,44}[a-z0-9])?", label_of(text))


def test_a_host_of_two_kinds_is_refused():
    two = Host("x", "t4", 2, kinds=("t4", "a100"))
    with pytest.raises(ClusterError, match="devices of 2 kinds"):
        launched(two)


# -- the command ----------------------------------------------------------------------------------

MACHINES = str(Path(__file__).parent.parent / "examples" / "mixed.toml")


def test_the_command_prints_writes_and_hands_flags_on(capsys, tmp_path):
    command = ["launch", "a.py", "--print", "slurm", "--cluster", MACHINES]
    assert main([*command, "--", "--steps", "7", "--resume"]) == 0
    shown = capsys.readouterr().out
    assert f"penstock train a.py --set cluster={MACHINES} --steps 7 --resume" in shown
    assert (
        main([*command, "--out", str(tmp_path / "job.sh"), "--", "--steps", "7", "--resume"]) == 0
    )
    assert (tmp_path / "job.sh").read_text() == shown
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["ranks"]) == ("slurm", 8)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--print", "lsf"], '--print is "lsf"'),
        (["--print", "slurm", "--", "--step", "7"], "no such option"),
        (["--print", "slurm", "--", "--steps", "none"], "steps"),
        (["--print", "kubernetes"], "no image is named"),
    ],
)
def test_what_cannot_be_launched_is_refused(capsys, flags, words):
    """Flags of train too, before anything is started elsewhere."""
    assert main(["launch", "a.py", "--cluster", MACHINES, *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert "hint: " in shown.err


def test_hosts_of_a_policy_know_their_pools(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One on demand and two preemptible, as the policy begins; other hosts are refused."""
    policy = PolicyFile("greedy", ("zone a",), 3, "", 9.0, 0.0, 1.0, 1.0, 1.0)
    hosts = "on-demand-0", "preemptible-1", "preemptible-2"
    replace(policy, hosts=hosts).save(tmp_path / "policy.toml")
    cluster(*MIXED).save(tmp_path / "cluster.toml")
    asked = ["launch", "job.py", "--cluster", str(tmp_path / "cluster.toml")]
    asked += ["--policy", str(tmp_path / "policy.toml"), "--print"]
    assert main([*asked, "torchrun"]) == 0
    script = capsys.readouterr().out
    rows = [line for line in script.splitlines() if "torchrun" in line and "exec" in line]
    pools = [re.findall("env PENSTOCK_POOL='([^']*)' torchrun", row) for row in rows]
    assert pools == [["zone a:on-demand"], ["zone a"], ["zone a"]]
    assert all(f"--elastic --set policy={tmp_path / 'policy.toml'}" in row for row in rows)
    assert main([*asked, "slurm"]) == 0
    jobs = re.findall(r"PENSTOCK_POOL=\S*zone a(:on-demand)?", capsys.readouterr().out)
    assert jobs == [":on-demand", ""]
    cluster(*ALIKE).save(tmp_path / "cluster.toml")
    assert main([*asked, "torchrun"]) == 2
    error = capsys.readouterr().err
    assert "2 preemptible hosts and 1 on demand; the cluster has 3 and 0" in error
