"""Many linear classifiers trained together: one for each stage and learning rate, in one set of matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOMENTUM = 0.9
TOP = 5
ACCURACIES = {"top1": "top-1 %", "top5": "top-5 %"}  # and what tables call them; top-5 of more than five classes


class Measured(NamedTuple):
    """Results of S·L heads on N images."""

    top1: Tensor  # (S, L) percent
    top5: Tensor  # (S, L) percent
    loss: Tensor  # (S, L)
    ranked: Tensor  # (N, S, L, up to 5) int64 classes, likeliest first
    label: Tensor  # (N,)


class Heads:
    """S stages × L rates of linear classifiers over features (B, ΣD) side by side, trained by SGD with momentum 0.9.

    Heads of a stage share their input, so its product with all their weights is one matrix product; and since the loss
    is the sum of independent losses, its gradient is written down here: no graph, a few kernels a step. Weights start
    at zero: the problem is convex. Biases do not decay, so that the optimum is logistic regression's.

    With ``batch_norm`` the features pass a BatchNorm1d without scale and shift first. Its statistics are those of all
    batches so far, in training too: frozen features do not drift, so they settle on the training set's, and there is no
    gap between the noisy statistics of a batch and those used for measuring.
    """

    def __init__(
        self, parts: Sequence[slice], rates: Tensor, classes: int, batch_norm: bool, decay: float, device: torch.device
    ) -> None:
        assert rates.shape[0] == len(parts)
        self.parts, self.classes, self.decay, self.batch_norm = tuple(parts), classes, decay, batch_norm
        self.rates = rates.to(device)  # (S, L)
        width, columns = max(part.stop for part in parts), rates.shape[1] * classes
        self.weight = torch.zeros(width, columns, device=device)  # (ΣD, L·C)
        self.bias = torch.zeros(len(parts), 1, columns, device=device)
        self.velocity, self.bias_velocity = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        self.mean, self.variance = torch.zeros(width, device=device), torch.ones(width, device=device)
        self._gradient = torch.empty_like(self.weight)
        # The rate of every number in the matrix, up to the schedule: one row for each stage.
        self._row_rates = self.rates.repeat_interleave(classes, 1)  # (S, L·C)

    def scores(self, features: Tensor) -> Tensor:
        """(S, B, L, C) from normalised features."""
        product = [features[:, part] @ self.weight[part] for part in self.parts]  # each (B, L·C)
        scores = torch.stack(product) + self.bias
        return scores.view(*scores.shape[:2], -1, self.classes)

    def step(self, features: Tensor, label: Tensor, number: int, factor: float) -> Tensor:
        """One SGD step with the rates times ``factor``; returns the losses (S, L) before it."""
        features = features.float()
        if self.batch_norm:
            variance, mean = torch.var_mean(features, 0)
            self.mean.lerp_(mean, 1 / (number + 1))
            self.variance.lerp_(variance, 1 / (number + 1))
            features = F.batch_norm(features, self.mean, self.variance)
        logs = self.scores(features).log_softmax(3)
        target = label.view(1, -1, 1, 1).expand(*logs.shape[:3], 1)
        losses = -logs.gather(3, target)[..., 0].mean(1)
        slope = logs.exp_().scatter_add_(3, target, -torch.ones_like(target, dtype=logs.dtype)).div_(len(label))
        slope = slope.flatten(2)  # (S, B, L·C): ∂loss/∂score = softmax − one-hot
        for stage, part in enumerate(self.parts):
            torch.mm(features[:, part].T, slope[stage], out=self._gradient[part])
        self._gradient.add_(self.weight, alpha=self.decay)
        self.velocity.mul_(MOMENTUM).add_(self._gradient)
        self.bias_velocity.mul_(MOMENTUM).add_(slope.sum(1, keepdim=True))
        for stage, part in enumerate(self.parts):
            self.weight[part].addcmul_(self.velocity[part], self._row_rates[stage], value=-factor)
        self.bias.addcmul_(self.bias_velocity, self._row_rates[:, None], value=-factor)
        return losses

    @torch.no_grad()
    def measure(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Measured:
        ranked, losses, labels = [], [], []
        for features, label in batches:
            features = features.float()
            if self.batch_norm:
                features = F.batch_norm(features, self.mean, self.variance)
            logs = self.scores(features).log_softmax(3)  # (S, B, L, C)
            target = label.view(1, -1, 1, 1).expand(*logs.shape[:3], 1)
            losses.append(-logs.gather(3, target)[..., 0].sum(1))
            ranked.append(logs.topk(min(TOP, self.classes), 3).indices.transpose(0, 1))
            labels.append(label)
        order, truth = torch.cat(ranked), torch.cat(labels)
        hits = order == truth.view(-1, 1, 1, 1)
        top1, top5 = (100 * hit.double().mean(0) for hit in (hits[..., 0], hits.any(3)))
        return Measured(top1, top5, torch.stack(losses).sum(0) / len(truth), order, truth)

    def state(self) -> dict[str, Tensor]:
        names = ("weight", "bias", "velocity", "bias_velocity", "mean", "variance")
        return {name: getattr(self, name) for name in names}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def pick(self, choice: Tensor) -> Heads:
        """The heads of one rate for each stage, ``choice`` (S,): for measuring only."""
        chosen = Heads(
            self.parts,
            self.rates.gather(1, choice[:, None].to(self.rates.device)),
            self.classes,
            self.batch_norm,
            self.decay,
            self.weight.device,
        )
        for stage, (part, rate) in enumerate(zip(self.parts, choice.tolist(), strict=True)):
            columns = slice(rate * self.classes, (rate + 1) * self.classes)
            chosen.weight[part], chosen.bias[stage] = self.weight[part, columns], self.bias[stage, :, columns]
        chosen.mean, chosen.variance = self.mean, self.variance
        return chosen


def best_rate(measured: Measured) -> Tensor:
    """For each stage the rate with the highest top-1, of equals the lowest loss; a diverged head is never it. (S,)"""
    diverged = ~measured.loss.isfinite()
    accuracy = measured.top1.masked_fill(diverged, -1)
    loss = measured.loss.masked_fill(diverged | (accuracy < accuracy.amax(1, keepdim=True)), math.inf)
    return loss.argmin(1).cpu()
