"""What lanes did, by kind of span: for tests of timelines."""

import numpy as np

from penstock.timeline import LANES, SPAN_KINDS


def kind_s(timeline, kind, *, lane="compute"):
    """Return for every rank the seconds that `lane` spent on spans of `kind`."""
    spans = timeline.spans
    chosen = (spans.kinds == SPAN_KINDS.index(kind)) & (spans.lanes == LANES.index(lane))
    seconds = spans.ends_s[chosen] - spans.starts_s[chosen]
    return tuple(np.bincount(spans.ranks[chosen], seconds, timeline.num_ranks).tolist())
