"""The headline figures of each protocol, and the paper's own (ResNet-50, ImageNet, batch 256, 200 epochs).

The paper's are printed beside a run's where both are measured on the same images, marked as the paper's: for
orientation, not measured here.
"""

from __future__ import annotations

PAPER_METHODS = ("NPIDv2", "NPIDv2-InterCLR", "MoCov2", "MoCov2-InterCLR", "BYOL", "BYOL-InterCLR")

# protocol → the images that the paper measures on, as built-in sets are called
MEASURED_ON = {
    "linear": "imagenet",
    "svm": "voc07",
    "low-shot": "voc07",
    "semi-supervised": "imagenet",
    "detection": "voc0712",  # trained on both years, tested on 2007
}

# protocol → figure → the paper's values in the order of PAPER_METHODS; empty where the paper has none
HEADLINES: dict[str, dict[str, tuple[float, ...]]] = {
    "knn": {"top1": ()},
    "linear": {"top1": (64.6, 65.7, 67.5, 68.0, 70.6, 73.5)},
    "svm": {"mAP": (81.7, 82.8, 84.2, 85.3, 85.1, 86.5)},
    "low-shot": {"mAP": (63.2, 65.8, 68.2, 70.7, 68.9, 69.6)},
    "semi-supervised": {
        "top1@1%": (),
        "top5@1%": (63.0, 65.8, 67.7, 72.7, 76.8, 79.4),
        "top1@10%": (),
        "top5@10%": (84.0, 84.5, 85.0, 85.9, 87.8, 89.2),
    },
    "detection": {"AP": (), "AP50": (81.5, 81.9, 82.4, 82.7, 81.4, 82.7), "AP75": ()},
    "clusters": {"nmi": (), "ari": (), "purity": ()},
}


def published(protocol: str, figure: str, data: str) -> tuple[float, ...]:
    """The paper's values in the order of PAPER_METHODS; none on other data than the paper's, where they say nothing."""
    return HEADLINES[protocol][figure] if MEASURED_ON.get(protocol) == data else ()
