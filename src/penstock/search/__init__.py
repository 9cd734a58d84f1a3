"""Search: the fastest, cheapest or smallest plan, every candidate simulated exactly."""

from penstock.search.search import Candidate as Candidate
from penstock.search.search import Objective as Objective
from penstock.search.search import Wish as Wish
from penstock.search.search import evaluate as evaluate
from penstock.search.search import search as search
