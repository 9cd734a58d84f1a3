"""Simulate: one step of a program on a clock that is only computed."""

from penstock.simulate.batch import step_seconds as step_seconds
from penstock.simulate.costs import Costs as Costs
from penstock.simulate.costs import Memory as Memory
from penstock.simulate.simulate import simulate as simulate
from penstock.simulate.table import Table as Table
from penstock.simulate.table import table_of as table_of
