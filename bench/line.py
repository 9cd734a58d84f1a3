"""Line: two ranks in places of their own (network.py), started by torchrun, as two hosts are.

python -m bench.line FOLDER      what torchrun starts at both ends: run the plans of FOLDER
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.network import Place
from bench.play import Block, Played, Rounds, Traced, play
from bench.zoo import JOBS
from penstock.choose.prepare import divided_step
from penstock.cluster import Cluster
from penstock.graph.joined.joined import joined
from penstock.graph.merge import merged
from penstock.graph.trace import capture
from penstock.listener import SILENT
from penstock.plan import Plan
from penstock.runtime.launch import join_torchrun, torchrun_store
from penstock.transport import Transport

LINE = (25e6, 0.001)  # bytes/s and seconds


def at_both_ends(places: Sequence[Place], module: Sequence[str], ranks: int = 1) -> str:
    """Run `python -m MODULE ...` by one torchrun at each end; return what the first one prints.

    ranks:    at each end.
    Raises:   CalledProcessError: one failed; both are gone.
    """
    rendezvous = ["--master-addr", places[0].address, "--master-port", str(_free_port())]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": places[0].device, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[str]] = []
    try:
        for number, place in enumerate(places):
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(places)}"]
            torchrun += [f"--nproc-per-node={ranks}", f"--node-rank={number}", *rendezvous, "-m"]
            command = [*place.enter, *_pinned(number, len(places)), *torchrun, *module]
            out = subprocess.PIPE if number == 0 else subprocess.DEVNULL
            started.append(subprocess.Popen(command, stdout=out, text=True, env=environment))
        told, _ = started[0].communicate()
        for each in started:
            if each.wait():
                raise subprocess.CalledProcessError(each.returncode, each.args)
        return told
    finally:
        for each in started:
            each.terminate()  # torchrun then ends its ranks
            each.wait()


def _pinned(number: int, count: int) -> list[str]:
    """Return the words that give a place cores of its own, where there are enough for all."""
    cores = sorted(os.sched_getaffinity(0))
    own = cores[number::count]
    return ["taskset", "-c", ",".join(map(str, own))] if len(cores) >= count else []


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("", 0))
        return own.getsockname()[1]


def cluster_over(places: Sequence[Place], folder: Path, module: str = "penstock") -> Cluster:
    """Return the cluster of both ends, as `penstock doctor --links` measures it.

    module:   of which `main` is that of penstock; in a test it measures less often.
    """
    file = folder / "cluster.toml"
    at_both_ends(places, [module, "doctor", "--links", "--out", str(file)])
    return Cluster.load(file)


def played_over(
    places: Sequence[Place], folder: Path, name: str, plans: Sequence[Plan], rounds: Rounds
) -> list[Played]:
    """Run plans of the model `name`, one rank at each end."""
    for number, plan in enumerate(plans):
        plan.save(folder / f"{number}.json")
    (folder / "task.json").write_text(json.dumps([name, len(plans), rounds]))
    at_both_ends(places, ["bench.line", str(folder)])
    rows = json.loads((folder / "played.json").read_text())
    return [Played([Block(*block) for block in blocks], peak) for blocks, peak in rows]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    name, count, rounds = json.loads((folder / "task.json").read_text())
    plans = [Plan.load(folder / f"{number}.json") for number in range(count)]
    counts = {plan.terms.joined for plan in plans}
    whole = divided_step(capture(JOBS[name]), plans[0].place.axis, SILENT)
    traced = {k: Traced(merged(JOBS[name], k), joined(whole, k)) for k in counts}

    def work(end: Transport) -> list[Played]:
        return play(traced, plans, lambda number: end, Rounds(*rounds))

    groups = [(0, 1)]
    found = join_torchrun(work, torchrun_store(), groups=groups)
    if os.environ["RANK"] == "0":
        (folder / "played.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
