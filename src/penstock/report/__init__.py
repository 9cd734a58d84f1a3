"""Report: the page that puts predicted beside measured."""

from penstock.report.report import Report as Report
from penstock.report.report import report as report
from penstock.report.report import report_of as report_of
