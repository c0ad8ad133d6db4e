"""Screening of a round's accepted results: out-of-scale updates are left out, long updates are clipped, and sample
counts are capped.

All limits are relative to the cohort's median, which honest devices decide while they are the majority.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from coordinator.compute.messages import Outlier
from coordinator.config import RobustConfig
from fedvit.methods.aggregators import norm_of
from fedvit.methods.base import Upload
from fedvit.program import LABELS
from fedvit.tensors import Array, TensorReader, reader_of

LEAST_COHORT = 3
"""Among fewer updates no outlier can be identified."""


class Screened(NamedTuple):
    uploads: list[Upload]
    outliers: list[Outlier]
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The limits of one run; None: no limit."""

    clip_norm: float | Literal["median"] | None = None  # longer deltas are scaled down to this norm
    reject_scale: float | None = None  # > 1; updates longer than this multiple of the median are left out
    max_weight: float | None = None  # >= 1; samples count up to this multiple of the cohort's median

    @classmethod
    def of(cls, config: RobustConfig) -> "Screen":
        return cls(clip_norm=config.clip_norm, reject_scale=config.reject_scale, max_weight=config.max_weight)

    def apply(self, uploads: Sequence[Upload]) -> Screened:
        """Reads every upload at most once; the outcome does not depend on the order of arrival."""
        if self == Screen() or not uploads:
            return Screened(list(uploads), [], {})
        kept, outliers = list(uploads), list[Outlier]()
        figures: dict[str, float] = {}
        if self.clip_norm is not None or self.reject_scale is not None:
            lengths = {upload.device: _lengths(upload.load()) for upload in uploads}
            outliers = self._outliers(lengths)
            out = {outlier.device for outlier in outliers}
            kept = [upload for upload in kept if upload.device not in out]
            kept, figures = self._clip(kept, {device: length.delta for device, length in lengths.items()})
            figures |= {"left_out": float(len(outliers))}
        return Screened(self._weigh(kept), outliers, figures)

    def _outliers(self, lengths: dict[str, "_Length"]) -> list[Outlier]:
        if self.reject_scale is None or len(lengths) < LEAST_COHORT:
            return []
        found: dict[str, str] = {}
        usual = median(length.delta for length in lengths.values())
        for device, length in lengths.items():
            if usual and length.delta > self.reject_scale * usual:
                found[device] = (
                    f"its update has norm {length.delta:.4g}, {length.delta / usual:.3g} times the cohort's median; "
                    f"at most {self.reject_scale:g} times is accepted"
                )
        for name in sorted({name for length in lengths.values() for name in length.features}):
            sizes = {device: length.features[name] for device, length in lengths.items() if name in length.features}
            usual = median(sizes.values())
            if len(sizes) < LEAST_COHORT or not usual:
                continue
            for device, size in sizes.items():
                # features that are far too small are as useless, and as easily forged, as those that are too large
                if not usual / self.reject_scale <= size <= usual * self.reject_scale:
                    found[device] = (
                        f"its {name!r} have root mean square {size:.4g}, the cohort's median is {usual:.4g}; "
                        f"at most {self.reject_scale:g} times more or less is accepted"
                    )
        return [Outlier(device, found[device]) for device in sorted(found)]

    def _clip(self, uploads: list[Upload], norms: dict[str, float]) -> tuple[list[Upload], dict[str, float]]:
        usual = median(norms.values())
        figures = {"median_norm": usual}
        if self.clip_norm is None:
            return uploads, figures
        limit = usual if self.clip_norm == "median" else self.clip_norm
        shortened = [
            upload._replace(load=partial(_scale, upload.load, limit / norms[upload.device]))
            if norms[upload.device] > limit
            else upload
            for upload in uploads
        ]
        return shortened, figures | {"clipped": float(sum(norms[upload.device] > limit for upload in uploads))}

    def _weigh(self, uploads: list[Upload]) -> list[Upload]:
        """Cap the sample counts: a device reports them itself, and also the announced numbers that bound them."""
        if self.max_weight is None or not uploads:
            return uploads
        most = max(1, math.floor(self.max_weight * median(upload.samples for upload in uploads)))
        return [upload._replace(samples=min(upload.samples, most)) for upload in uploads]


class _Length(NamedTuple):
    delta: float  # Euclidean norm of all deltas together
    features: dict[str, float]  # collected values -> root mean square


def _lengths(tensors: Mapping[str, Array]) -> _Length:
    """If an upload has labels, its tensors with one row per label are features."""
    if LABELS not in tensors:
        return _Length(norm_of(tensors), {})
    reader = reader_of(tensors)
    rows = reader.shape(LABELS)[0]
    collected = {name for name in reader if name != LABELS and reader.shape(name)[:1] == (rows,)}
    return _Length(
        norm_of(reader, reader.keys() - collected - {LABELS}),
        {name: norm_of(reader, {name}) / math.sqrt(math.prod(reader.shape(name))) for name in collected if rows},
    )


class _Scaled(TensorReader):
    """Deltas times a factor, as they are read; labels stay."""

    def __init__(self, tensors: Mapping[str, Array], factor: float) -> None:
        self._tensors = reader_of(tensors)
        self._factor = factor

    @property
    def names(self) -> Collection[str]:
        return self._tensors.names

    @property
    def stored_bytes(self) -> int:
        return self._tensors.stored_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def part(self, name: str, first: int, last: int) -> Array:
        value = self._tensors.part(name, first, last)
        if name == LABELS or not np.issubdtype(value.dtype, np.floating):
            return value
        scaled: Array = np.multiply(value, np.asarray(self._factor, value.dtype))
        return scaled


def _scale(load: Callable[[], Mapping[str, Array]], factor: float) -> TensorReader:
    return _Scaled(load(), factor)
