"""Test oracle of the stages of a head: progressive cluster optimization (LVFace) with all logits at once, float64."""

import torch
import torch.nn.functional as F

from facetrain.head.class_shard import ClassShard
from facetrain.head.sampling import Stage
from tests.support.dense_head import MARGINS, margin_logits, sample_classes

CLASSES, SEED = 23, 3
STAGES = (
    Stage(0, 0.4, "off"),
    Stage(2, 0.4, "moving"),
    Stage(5, 1.0, "fixed"),
)
SCALE, MARGIN = MARGINS["cosface"]["scale"], 0.3


class DenseReference:
    """Stages of progressive cluster optimization with all logits at once, by autograd."""

    def __init__(self, weight, stages=STAGES):
        self.weight = weight.clone().requires_grad_()
        self.momentum = torch.zeros_like(weight)
        self.expectation = None
        self.stages = stages

    def loss(self, embedding, label, step):
        stage = [stage for stage in self.stages if stage.first_step <= step][-1]
        rows = torch.arange(CLASSES)
        if stage.sample_rate < 1:
            rows = sample_classes(ClassShard(0, CLASSES), label, stage.sample_rate, seed=SEED, step=step)
        if stage.expectations != "off" and self.expectation is None:
            self.expectation = F.normalize(self.weight.detach())
        unit, target = F.normalize(embedding), torch.searchsorted(rows, label)
        logits = margin_logits(unit @ F.normalize(self.weight[rows]).T, target, MARGINS["cosface"])
        ratios = [torch.zeros(len(label), dtype=torch.float64), log_ratio(logits, target)]
        if stage.expectations != "off":
            cos = unit @ F.normalize(self.expectation[rows]).T
            ratios.append(log_ratio(margin_logits(cos, target, {"scale": SCALE, "m3": MARGIN}), target))
        return torch.logsumexp(torch.stack(ratios), 0).mean(), rows, stage, unit.detach()

    def update(self, rows, stage, unit, label):
        with torch.no_grad():
            self.momentum[rows] = 0.9 * self.momentum[rows] + self.weight.grad[rows]
            self.weight[rows] -= 0.1 * self.momentum[rows]
        self.weight.grad = None
        if stage.expectations == "moving":
            for number in label.unique():
                old = self.expectation[number]
                alphas = [torch.sigmoid(F.normalize(old, dim=0) @ x) for x in unit[label == number]]
                new = [a * old + (1 - a) * x for a, x in zip(alphas, unit[label == number], strict=True)]
                self.expectation[number] = torch.stack(new).mean(0)


def log_ratio(logits, target):
    negatives = logits.masked_fill(F.one_hot(target, logits.shape[1]).bool(), -torch.inf)
    return negatives.logsumexp(1) - logits.gather(1, target[:, None])[:, 0]
