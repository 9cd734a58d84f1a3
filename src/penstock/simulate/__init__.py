"""Simulate: one step of a program on a clock that is only computed."""

from penstock.simulate.costs import Costs as Costs
from penstock.simulate.costs import Memory as Memory
from penstock.simulate.simulate import simulate as simulate
