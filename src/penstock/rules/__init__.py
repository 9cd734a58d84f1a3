"""Rules: what a user decides of a plan, by patterns of module paths; the search keeps to them."""

from penstock.rules.language import cut as cut
from penstock.rules.language import fuse as fuse
from penstock.rules.language import keep as keep
from penstock.rules.language import offload as offload
from penstock.rules.language import recompute as recompute
from penstock.rules.language import replicate as replicate
from penstock.rules.language import shard as shard
from penstock.rules.language import split as split
from penstock.rules.rewrite import rewritten as rewritten
from penstock.rules.rule import Rule as Rule
from penstock.rules.rule import load as load
