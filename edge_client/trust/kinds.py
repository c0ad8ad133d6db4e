"""The lattice of the information-flow check: of what kind the terms of a value are, and where its samples lie.

A value is a sum of terms, and a term is a product of factors. The check keeps the set of the terms' kinds: a sum has
those of both sides, a product every combination. A copied image stays visible beside any number of honest terms.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from fedvit.errors import NotAllowed

Shape = tuple[int, ...]
FLOW = "FV1441"
"""Code of a Program or graph that the check refuses."""


class Kind(enum.IntFlag):
    """The data that a term tells of. The value of a constant zero has no term."""

    PUBLIC = 1  # constants, rates, drawn numbers, padding and masks
    WEIGHT = 2  # a declared tensor that the server knows
    UPDATE = 4  # a signal, or features times features, summed over samples: a gradient, a loss, a regression's sums
    PERSONAL = 8  # a local tensor, or class counts
    LABEL = 16  # labels
    LINEAR = 32  # images or text behind linear layers of declared tensors
    FEATURE = 64  # the same behind a function that is not linear
    RAW = 128  # images or text, however copied, cut, scaled or averaged
    MARKED = 256  # numbers of a local tensor, each times a number that labels give it
    SIGNAL = 512  # features times labels or a teacher: the error that a backward pass carries, of each sample
    TEACHER = 1024  # features that only tensors from the server have made, which no step moves


_ORDER = (
    Kind.PUBLIC, Kind.WEIGHT, Kind.UPDATE, Kind.PERSONAL, Kind.LABEL, Kind.MARKED, Kind.LINEAR, Kind.FEATURE, Kind.RAW,
)  # fmt: skip
_COMPUTED = Kind.LINEAR | Kind.FEATURE | Kind.SIGNAL | Kind.TEACHER
_LINEAR_FACTORS = Kind.PUBLIC | Kind.WEIGHT | Kind.UPDATE | Kind.PERSONAL
_LAYERS = Kind.WEIGHT | Kind.UPDATE | Kind.PERSONAL
NOTHING = Kind(0)


@cache
def multiply(left: Kind, right: Kind, *, contracted: bool = False, of_samples: bool = True) -> Kind:
    """Kinds of a product.

    `contracted`: of a layer, which sums over an axis that is not that of the samples. `of_samples`: both sides have a
    value for each sample; else labels, such as their sum over a batch, make no signal of features.
    """
    result = NOTHING
    for one in left:
        for other in right:
            result |= _multiply_terms(one, other, contracted, of_samples)
    return result


def _multiply_terms(one: Kind, other: Kind, contracted: bool, of_samples: bool) -> Kind:
    both = one | other
    if both & Kind.SIGNAL:
        return Kind.SIGNAL
    if both & Kind.RAW:
        return Kind.LINEAR if contracted and both & _LAYERS else Kind.RAW
    if both & _COMPUTED:
        is_taught = both == Kind.FEATURE | Kind.TEACHER
        if is_taught or both & (Kind.LABEL | Kind.MARKED):
            return Kind.SIGNAL if of_samples else Kind.FEATURE
        if both & Kind.TEACHER and not both & Kind.LINEAR:
            return Kind.TEACHER
        is_linear = both & Kind.LINEAR and both & _LINEAR_FACTORS == both & ~Kind.LINEAR
        return Kind.LINEAR if is_linear and one != other else Kind.FEATURE
    if both & Kind.MARKED or (both == Kind.LABEL | Kind.PERSONAL and not contracted):
        return Kind.MARKED
    return max(one, other, key=_ORDER.index)


@cache
def apply_function(kinds: Kind, *, per_sample: bool) -> Kind:
    """Kinds behind a function that is not linear.

    Of a value of each sample the function mixes all terms: a bias beside features is then no term by itself. A signal
    becomes a feature, because a backward pass is linear: images times a function of a signal stay images.
    """
    if not kinds:
        return Kind.PUBLIC
    if not per_sample:
        return kinds
    result = kinds & Kind.RAW
    if kinds & _COMPUTED:
        result |= Kind.FEATURE
    return result or max(kinds, key=_ORDER.index)


@cache
def sum_samples(kinds: Kind) -> Kind:
    """Kinds of a sum over samples."""
    return (kinds & ~Kind.SIGNAL) | Kind.UPDATE if kinds & Kind.SIGNAL else kinds


@dataclass(frozen=True)
class Samples:
    """Places of the samples of a batch: axis `axis` has outer x count x inner places."""

    axis: int
    outer: int
    count: int
    inner: int


@dataclass(frozen=True)
class Value:
    """A tensor of a graph, as the check sees it."""

    shape: Shape
    kinds: Kind
    samples: Samples | None = None
    rows: float = math.inf  # fewest samples over which a term was summed
    uniform: bool = False  # one number everywhere
    repeated: frozenset[int] = frozenset()  # axes along which it is repeated
    is_first_step: bool = False  # the condition that this is the first step of a phase
    pools: bool = False  # places that a maximum was taken from
    is_from_server: bool = False  # made of samples and of tensors that the server knows and no step moves, alone

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def is_repeated(self, axis: int) -> bool:
        """Return whether the value is the same for every place of an axis."""
        return self.uniform or axis in self.repeated or self.shape[axis] == 1


def attribute(value: Value, made_of: Iterable[Value]) -> Value:
    """Return a value that knows whether everything that it is made of is from the server: its features are then those
    of a teacher."""
    is_from_server = all(one.is_from_server for one in made_of)
    kinds = value.kinds
    if is_from_server and kinds & Kind.FEATURE:
        kinds = (kinds & ~Kind.FEATURE) | Kind.TEACHER
    if (kinds, is_from_server) == (value.kinds, value.is_from_server):
        return value
    return replace(value, kinds=kinds, is_from_server=is_from_server)


def refuse(reason: str) -> NotAllowed:
    """Make the error of a graph that the check refuses."""
    return NotAllowed(FLOW, reason)


def broadcast(values: Iterable[Value]) -> tuple[Shape, Samples | None]:
    """Return shape and samples of an elementwise operator's result.

    Raises NotAllowed if a value that is not of the samples differs between them: it could choose some of them.
    """
    values = tuple(values)
    length = max(len(value.shape) for value in values)
    shape = []
    for axis in range(-length, 0):
        lengths = {value.shape[axis] for value in values if -axis <= len(value.shape)} - {1}
        if len(lengths) > 1:
            raise refuse(f"shapes {[value.shape for value in values]} do not fit together")
        shape.append(lengths.pop() if lengths else 1)
    result = tuple(shape)
    found: Samples | None = None
    for value in values:
        if value.samples:
            placed = shift(value.samples, length - len(value.shape), result)
            if found and placed != found and placed.count > 1:
                raise refuse("samples are combined with other samples")
            found = placed
    if found and found.count > 1:
        for value in values:
            axis = found.axis - (length - len(value.shape))
            if not value.samples and value.kinds and axis >= 0 and not value.is_repeated(axis):
                raise refuse("an operator weighs the samples of a batch differently")
    return result, found


def shift(samples: Samples, by: int, shape: Shape) -> Samples:
    """Return the same samples `by` axes further back; a single sample takes the whole axis."""
    axis = samples.axis + by
    if samples.count == 1:
        return Samples(axis, 1, 1, shape[axis])
    return replace(samples, axis=axis)


def reshape_samples(samples: Samples, before: Shape, after: Shape) -> Samples:
    """Return where samples lie after a change of shape. Raises NotAllowed if they are no part of one axis any more."""
    stride = samples.inner * math.prod(before[samples.axis + 1 :])
    behind = 1
    for axis in reversed(range(len(after))):
        places = after[axis]
        if stride % behind == 0 and behind * places >= stride * samples.count:
            inner = stride // behind
            if places % (samples.count * inner) == 0:
                return Samples(axis, places // (samples.count * inner), samples.count, inner)
        behind *= places
    if samples.count == 1:
        return Samples(0, 1, 1, after[0] if after else 1)
    raise refuse("a change of shape mixes the samples of a batch")
