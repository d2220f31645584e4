"""What the paper reports for MoCov2-InterCLR (ResNet-50, ImageNet, batch 256, 200 epochs). Not measured here."""

from __future__ import annotations

# (protocol, figure) → the paper's figure, as text
PAPER: dict[tuple[str, str], str] = {
    ("linear", "top1"): "68.0",
    ("svm", "mAP"): "85.3",
    ("low-shot", "mAP"): "70.7",
    ("semi-supervised", "top5_1%"): "72.7",
    ("semi-supervised", "top5_10%"): "85.9",
    ("detection", "AP50"): "82.7",
}
