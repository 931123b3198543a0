"""One page about runs, from the files they leave. numpy only; matplotlib to draw."""

from dppo.report.figures import make_pictures
from dppo.report.page import make_page
from dppo.report.picture import Picture
from dppo.report.read import RunData, read_runs

__all__ = ["Picture", "RunData", "make_page", "make_pictures", "read_runs"]
