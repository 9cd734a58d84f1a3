"""Search: the fastest, cheapest or smallest plan, simulated exactly."""

from penstock.search.candidate import Candidate as Candidate
from penstock.search.candidate import Objective as Objective
from penstock.search.field import Tally as Tally
from penstock.search.field import front_of as front_of
from penstock.search.search import SearchResult as SearchResult
from penstock.search.search import drained_s as drained_s
from penstock.search.search import evaluate as evaluate
from penstock.search.search import search as search
from penstock.search.shapes import Fixed as Fixed
from penstock.search.shapes import JobNeeds as JobNeeds
from penstock.search.shapes import RankExchange as RankExchange
