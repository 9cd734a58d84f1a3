"""Batches: data of a job, from datasets; micro-batch k is the same on every rank."""

from penstock.batches.bucketed import bucketed as bucketed
from penstock.batches.in_order import InOrder as InOrder
from penstock.batches.loader import batches as batches
from penstock.batches.loader import epoch_of as epoch_of
from penstock.batches.loader import from_loader as from_loader
from penstock.batches.packed import document_mask as document_mask
from penstock.batches.packed import packed as packed
from penstock.batches.reads import Data as Data
from penstock.batches.reads import Endless as Endless
from penstock.batches.reads import ReadNumbers as ReadNumbers
from penstock.batches.reads import read as read
from penstock.batches.reads import started as started
