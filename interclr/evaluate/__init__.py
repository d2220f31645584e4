"""Evaluations. To add one: a file with a class of settings, and its name below."""

from interclr.evaluate.base import Evaluation
from interclr.evaluate.clusters import Clusters
from interclr.evaluate.detection import Detection
from interclr.evaluate.knn import KNN
from interclr.evaluate.linear import Linear
from interclr.evaluate.low_shot import LowShot
from interclr.evaluate.requested import Request
from interclr.evaluate.semi_supervised import SemiSupervised
from interclr.evaluate.session import evaluate
from interclr.evaluate.subject import open_subject
from interclr.evaluate.svm import SVM

PROTOCOLS: dict[str, type[Evaluation]] = {
    "knn": KNN,
    "linear": Linear,
    "svm": SVM,
    "low-shot": LowShot,
    "semi-supervised": SemiSupervised,
    "clusters": Clusters,
    "detection": Detection,  # last of all: it takes by far the longest
}

__all__ = ["PROTOCOLS", "Evaluation", "Request", "evaluate", "open_subject"]
