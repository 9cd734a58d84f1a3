"""Simulate: one step of a program on a computed clock."""

from penstock.simulate.costs import Costs as Costs
from penstock.simulate.costs import Memory as Memory
from penstock.simulate.critical_path import Hop as Hop
from penstock.simulate.critical_path import Path as Path
from penstock.simulate.critical_path import critical_path as critical_path
from penstock.simulate.many_candidates import step_seconds as step_seconds
from penstock.simulate.measured_seconds import record as record
from penstock.simulate.recorded import Recorded as Recorded
from penstock.simulate.simulate import Simulator as Simulator
from penstock.simulate.simulate import simulate as simulate
from penstock.simulate.wait_table import Table as Table
from penstock.simulate.wait_table import table_of as table_of
