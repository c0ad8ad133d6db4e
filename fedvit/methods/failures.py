"""Errors of a method's own code, with the place where they happened."""

import inspect
import traceback

import torch
from torch import Tensor

from fedvit.errors import FedvitError
from fedvit.methods.base import PREDICT, Method
from fedvit.methods.calculus import Named
from fedvit.methods.step import Serves, Step, Update


class MethodFailed(FedvitError):
    """A method's own code raised an error."""


def name_errors(step: Step, method: Method, serves: Serves) -> Step:
    """The step, whose errors name the method, the phase and the line of the method's file. Raises MethodFailed."""
    file = inspect.getsourcefile(type(method))
    assert not isinstance(serves, Update)  # the same code for all methods
    phase = serves.graph if serves else PREDICT

    def call(inputs: Named) -> dict[str, Tensor]:
        try:
            return step(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
            raise MethodFailed(
                "FV2130",
                f"{type(method).__name__}, phase {phase!r}, {place.filename}:{place.lineno}: "
                f"{type(error).__name__}: {error}",
            ) from error

    return call
