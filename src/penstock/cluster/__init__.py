"""Cluster: the machines: device kinds, hosts, and the links between ranks."""

from penstock.cluster.cluster import Cluster as Cluster
from penstock.cluster.cluster import DeviceKind as DeviceKind
from penstock.cluster.cluster import Host as Host
from penstock.cluster.cluster import HostPair as HostPair
from penstock.cluster.cluster import Link as Link
from penstock.cluster.collectives import Algorithm as Algorithm
from penstock.cluster.collectives import Collective as Collective
from penstock.cluster.collectives import Fastest as Fastest
from penstock.cluster.collectives import best as best
from penstock.cluster.collectives import way_of as way_of
