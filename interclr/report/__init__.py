"""One self-contained HTML page per run: curves, a map of the embedding, clusters, neighbours, negatives, odd images."""

from interclr.report.write import POINTS, report

__all__ = ["POINTS", "report"]
