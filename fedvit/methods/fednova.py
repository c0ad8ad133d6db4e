"""FedNova: devices that take more steps do not pull the shared model further."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.aggregators import Delta
from fedvit.methods.base import ServerRule, Upload
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class FedNova(FedAvg):
    """The server adds t sum_i p_i D_i / t_i, for t_i steps of device i, its share p_i of the images, t = sum_i p_i t_i.

    Source: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
    NeurIPS 2020, arXiv:2007.07481, eq. 6 for plain SGD. Differs from the paper: with momentum the same t_i.
    """

    source: ClassVar[str] = "Wang et al., NeurIPS 2020, arXiv:2007.07481"

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return NormalisedMean(epochs=self.epochs, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class NormalisedMean(WeightedMean):
    """A mean in which each device's delta is divided by its number of steps. Equal numbers of steps make it FedAvg.

    `epochs` and `batch_size` stand in for numbers that no device has counted.
    """

    epochs: int
    batch_size: int

    why_no_regions = "its server needs the number of steps of each single device"
    averages = False
    """No other aggregator reads the weights, in which the numbers of steps are."""

    def weigh(self, uploads: Sequence[Upload], round_number: int) -> list[Delta]:
        steps = {upload.device: upload.count_steps(self.epochs, self.batch_size) for upload in uploads}
        samples = {upload.device: upload.samples for upload in uploads}
        mean_steps = sum(samples[device] * steps[device] for device in steps) / max(1, sum(samples.values()))
        learned = [upload for upload in uploads if upload.samples]
        return [
            delta._replace(weight=delta.weight * mean_steps / steps[upload.device])
            for upload, delta in zip(learned, super().weigh(uploads, round_number), strict=True)
        ]
