"""Cluster: what there is: device kinds, hosts, and the links between ranks."""

from penstock.cluster.cluster import Cluster as Cluster
from penstock.cluster.cluster import DeviceKind as DeviceKind
from penstock.cluster.cluster import Host as Host
from penstock.cluster.cluster import Link as Link
