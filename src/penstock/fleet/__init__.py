"""The fleet: hours and dollars of training on machines that come and go."""

from penstock.fleet.market import Market as Market
from penstock.fleet.market import MarketPool as MarketPool
from penstock.fleet.traces import read_market as read_market
