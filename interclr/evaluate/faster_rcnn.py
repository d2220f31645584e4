"""Faster R-CNN on a ResNet's C4 map, from torchvision's parts: stem … stage 3 feed the RPN, stage 4 is the box head.

As Detectron2's ``R_50_C4`` and, for contrastive pre-training, MoCo's variant: every BatchNorm is tuned with the rest,
and one more is put after the box head (``Res5ROIHeadsExtraNorm``), because that head's features are not those of
a supervised network. What is torchvision's and not Detectron2's: smooth L1 turns at 1/9 rather than at 0, and images
are resized on the device by bilinear interpolation.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import roi_align

from interclr.evaluate.base import Subject
from interclr.types import UserError

RATIOS = (0.5, 1.0, 2.0)
ROI_SIZE = 14
PROBE = 128  # pixels of the image that tells the stride


class C4(nn.Module):
    """Stem and stages 1 to 3, in bfloat16 where told so; what comes out is float32.

    Anchors and boxes take the features' type, and bfloat16 has steps of 4 pixels at 600.
    """

    def __init__(self, network: Any, half: bool = False) -> None:
        super().__init__()
        self.half_precision = half
        activation = network.relu if hasattr(network, "relu") else network.act1  # torchvision's name, timm's
        self.stem = nn.Sequential(network.conv1, network.bn1, activation, network.maxpool)
        self.layer1, self.layer2, self.layer3 = network.layer1, network.layer2, network.layer3
        probed = _probe(self, torch.zeros(1, 3, PROBE, PROBE))
        self.out_channels, self.stride = probed.shape[1], PROBE // probed.shape[3]

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.half_precision):
            features: Tensor = self.layer3(self.layer2(self.layer1(self.stem(images))))
        return features.float()


class RoIAlign(nn.Module):
    """Detectron2's ``ROIAlignV2``: aligned to half pixels, as many samples as the box has cells."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], _: list[tuple[int, int]]) -> Tensor:
        pooled: Tensor = roi_align(features["0"], boxes, ROI_SIZE, 1 / self.stride, sampling_ratio=0, aligned=True)
        return pooled


class Stage4Head(nn.Module):
    """As ``C4``: float32 comes out, for boxes and scores."""

    def __init__(self, network: Any, channels: int, extra_norm: bool, half: bool = False) -> None:
        super().__init__()
        self.half_precision = half
        self.layer4 = network.layer4
        self.features = _probe(self.layer4, torch.zeros(1, channels, ROI_SIZE, ROI_SIZE)).shape[1]
        self.norm = nn.BatchNorm2d(self.features) if extra_norm else nn.Identity()

    def forward(self, regions: Tensor) -> Tensor:
        with torch.autocast(regions.device.type, torch.bfloat16, enabled=self.half_precision):
            pooled: Tensor = self.norm(self.layer4(regions)).mean(dim=(2, 3))
        return pooled.float()


def build(
    subject: Subject,
    classes: int,
    *,
    anchors: tuple[int, ...],
    regions: int,
    test_proposals: int,
    short_sides: tuple[int, ...],
    long_side: int,
    extra_norm: bool,
    half: bool = False,
) -> GeneralizedRCNN:
    """A detector that starts from a copy of the subject's weights; what is new is drawn from torch's generator."""
    network: Any = copy.deepcopy(subject.backbone.network).cpu().requires_grad_(True)
    needed = ("conv1", "bn1", "maxpool", "layer1", "layer2", "layer3", "layer4")
    if not all(hasattr(network, name) for name in needed) or isinstance(network.layer4, nn.Identity):
        raise UserError(
            f"detection needs a ResNet with four stages, torchvision's or timm's; {subject.name} is none "
            "(it trains the first three as features and the fourth as box head)"
        )
    features = C4(network, half)
    head = Stage4Head(network, features.out_channels, extra_norm, half)
    generator = AnchorGenerator((anchors,), (RATIOS,))
    rpn = RegionProposalNetwork(
        generator,
        RPNHead(features.out_channels, generator.num_anchors_per_location()[0]),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 12_000, "testing": 6 * test_proposals},
        post_nms_top_n={"training": 2_000, "testing": test_proposals},
        nms_thresh=0.7,
    )
    predictor = FastRCNNPredictor(head.features, classes + 1)
    for layer, spread in ((predictor.cls_score, 0.01), (predictor.bbox_pred, 0.001)):
        nn.init.normal_(layer.weight, std=spread)
        nn.init.zeros_(layer.bias)
    heads = RoIHeads(
        RoIAlign(features.stride),
        head,
        predictor,
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=regions,
        positive_fraction=0.25,
        bbox_reg_weights=None,
        score_thresh=0.05,
        nms_thresh=0.5,
        detections_per_img=100,
    )
    transform = GeneralizedRCNNTransform(short_sides, long_side, list(subject.mean), list(subject.std))
    return GeneralizedRCNN(features, rpn, heads, transform)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Normalisation does not decay, everything else does: Detectron2's rule."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
    plain = {id(p) for module in model.modules() if isinstance(module, norms) for p in module.parameters()}
    return [
        {"params": [p for p in model.parameters() if id(p) not in plain], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if id(p) in plain], "weight_decay": 0.0},
    ]


@torch.no_grad()
def _probe(module: nn.Module, image: Tensor) -> Tensor:
    training = module.training
    output: Tensor = module.eval()(image)
    module.train(training)
    return output
