"""First links: the link between a host's accelerators, measured by the first run on several."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.choose.prepare import tell_day
from penstock.cluster.cluster import Cluster
from penstock.files import cache_folder
from penstock.listener import Listener
from penstock.profile.kept_profiles import keep_link, kept_link

if TYPE_CHECKING:
    from penstock.training.rendezvous import Rendezvous

_KNOWN = "penstock/link"  # a key of the store: empty where the link has to be measured


def linked(rendezvous: "Rendezvous", listener: Listener) -> Cluster | None:
    """Return this host, with the link that was kept or is measured now; None on other ranks.

    Every rank calls it: each is a process on an accelerator of its own.
    """
    from penstock.gauge.hosts import link_inside
    from penstock.runtime.launch import join_torchrun, under

    is_first, count = rendezvous.rank == 0, rendezvous.num_ranks
    if count < 2:
        return None
    folder, link = cache_folder("profiles"), None
    if is_first:
        link = kept_link(folder, partial(tell_day, "link", listener))
        rendezvous.put(_KNOWN, "" if link is None else "kept")
    if link is None and (is_first or not rendezvous.take(_KNOWN)):
        with listener.busy("measuring the links between accelerators"):
            store = under(rendezvous.store, "link")
            measured = join_torchrun(link_inside, store, way=rendezvous.way)
        if is_first:
            link = keep_link(folder, measured)
            listener.say(f"link between accelerators, measured: {link}")
    return None if link is None else replace(Cluster.here(count), inside=link)
