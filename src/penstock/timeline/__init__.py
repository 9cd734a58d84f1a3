"""Timeline: who did what, from when to when, and the bytes held; simulated or measured."""

from penstock.timeline.draw import draw as draw
from penstock.timeline.spans import LANES as LANES
from penstock.timeline.spans import SPAN_KINDS as SPAN_KINDS
from penstock.timeline.spans import Held as Held
from penstock.timeline.spans import Lane as Lane
from penstock.timeline.spans import MemoryCurve as MemoryCurve
from penstock.timeline.spans import Span as Span
from penstock.timeline.spans import SpanKind as SpanKind
from penstock.timeline.spans import Spans as Spans
from penstock.timeline.spans import Totals as Totals
from penstock.timeline.svg import svg_of as svg_of
from penstock.timeline.timeline import Timeline as Timeline
from penstock.timeline.timeline import align as align
from penstock.timeline.timeline import bubble_fraction as bubble_fraction
from penstock.timeline.timeline import busy_s as busy_s
from penstock.timeline.timeline import kind_s as kind_s
from penstock.timeline.timeline import peak_bytes as peak_bytes
from penstock.timeline.timeline import step_s as step_s
