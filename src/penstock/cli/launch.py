"""penstock launch: the same training under other programs that start processes on many hosts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

import typer

from penstock.cli import face
from penstock.cli.of_flags import of_flags
from penstock.cli.of_job import JobCommand
from penstock.cli.train import train
from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.files import write_text
from penstock.manifest import Kind, Launched, manifest
from penstock.plan.plan import Plan

_KINDS = "|".join(get_args(Kind))


class LaunchFlags(NamedTuple):
    """What is to be launched, and where."""

    job: Annotated[str, typer.Argument(metavar="JOB", help="A file.py[:name] or module[:name].")]
    kind: Annotated[str, typer.Option("--print", metavar=_KINDS, help="For which program.")]
    cluster: Annotated[Path, typer.Option(help="The machines (TOML) to start it on.")]
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAGS", help="Of `penstock train`.")
    ] = None
    plan: Annotated[Path | None, typer.Option(help="Train with this plan, on its hosts.")] = None
    policy: Annotated[
        Path | None, typer.Option(help="Follow this policy: the hosts are those it begins with.")
    ] = None
    image: Annotated[str, typer.Option(help="Of a container, for kubernetes.")] = ""
    volume: Annotated[str, typer.Option(help="A claim that all hosts see, for kubernetes.")] = ""
    name: Annotated[str, typer.Option(help="Default: that of the job.")] = ""
    out: Annotated[Path | None, typer.Option(help="Write it to this file.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print it as a text of JSON.")] = False


@of_flags
def launch(asked: LaunchFlags) -> None:
    """Print what torchrun, Kubernetes, SkyPilot or Slurm needs to train a job on a cluster.

    Example: penstock launch job.py --print slurm --cluster c.toml -- --out /shared/run --resume
    """
    found = next((each for each in get_args(Kind) if each == asked.kind), None)
    if found is None:
        raise PlanError(f'--print is "{asked.kind}"', hint=f"it can be {_KINDS.replace('|', ', ')}")
    machines = Cluster.load(asked.cluster)
    own = ["--set", f"cluster={asked.cluster}"]
    if asked.plan is not None:
        own += ["--plan", str(asked.plan)]
        _check_plan(Plan.load(asked.plan), machines, asked.plan)
    pools: tuple[str, ...] = ()
    if asked.policy is not None:
        own += ["--elastic", "--set", f"policy={asked.policy}"]
        pools = _pools(machines, asked.policy)
    command = ("train", asked.job, *own, *(asked.flags or ()))
    _check(command[1:])
    name, where = asked.name or asked.job, (asked.image, asked.volume)
    text = manifest(Launched(name, command, machines, *where, pools=pools), found)
    if asked.out is not None:
        face.check_place(asked.out)
        write_text(asked.out, text)
        face.say(f"wrote {asked.out}")
    elif asked.as_json:
        face.show_json({"kind": found, "ranks": machines.num_ranks, "text": text})
    else:
        face.show(text.rstrip("\n"))


def _check_plan(plan: Plan, cluster: Cluster, path: Path) -> None:
    """Raise unless the cluster has as many ranks as the plan.

    Raises:   PlanError: it has not.
    """
    if plan.total_ranks != cluster.num_ranks:
        message = f"{path} is for {plan.total_ranks} ranks, the cluster has {cluster.num_ranks}"
        raise PlanError(message, hint="leave the hosts in --cluster that the plan is for")


def _pools(cluster: Cluster, path: Path) -> tuple[str, ...]:
    """Return of which pool each host of a cluster is, which has those that a policy begins with.

    Raises:   FleetError: it has other hosts, or the file is damaged.
    """
    from penstock.errors import FleetError
    from penstock.fleet.policy_file import read_policy
    from penstock.pilot.wishes import ON_DEMAND

    policy = read_policy(path)
    kinds = {kind.name: kind.preemptible for kind in cluster.devices}
    are = [kinds[host.device] for host in cluster.hosts]
    sure = sum(name.startswith("on-demand") for name in policy.hosts)
    wanted = len(policy.hosts) - sure, sure
    if (sum(are), len(are) - sum(are)) != wanted:
        message = f"{path} begins with {wanted[0]} preemptible hosts and {wanted[1]} on demand; "
        message += f"the cluster has {sum(are)} and {len(are) - sum(are)}"
        raise FleetError(
            message, hint="leave so many in --cluster, and `preemptible` of their device"
        )
    return tuple(policy.pools[0] + ("" if spot else ON_DEMAND) for spot in are)


def _check(arguments: Sequence[str]) -> None:
    """Raise if `penstock train` would not take these arguments, as it would itself."""
    command = typer.Typer(add_completion=False)
    command.command(cls=JobCommand)(train)
    typer.main.get_command(command).make_context("penstock train", [*arguments])
