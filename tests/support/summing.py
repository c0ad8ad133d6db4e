"""Devices of runs in memory that add up their results in secret."""

from typing import Any

import numpy as np

from fedvit.resources import ResourceUse
from fedvit.secure.layout import make_evaluation_payload, make_training_payload, make_vector
from fedvit.secure.vectors import Vector
from fedvit.tensors import Tensors
from fedvit.wire.messages import Result, SumInvite, SumMasked, SumQuestion, Task
from tests.support.runs import Fake
from tests.support.sums import MemoryDevice


class SummingFake(Fake):
    """A device that keeps its results until they are added up."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._payloads: dict[tuple[int, str], Tensors] = {}  # by round and kind
        self._parts: dict[tuple[int, str], MemoryDevice] = {}
        super().__init__(*arguments, **options)

    def upload(self, task: Task) -> Tensors:
        program = self.stage.program(task)
        return {name: np.full(program.tensors[name].shape, self.value, np.float32) for name in program.list_summed()}

    def answer(self, task: Task, tensors: Tensors | None = None) -> Result:
        """Keep the result, and send one without a number."""
        hello, program = self.hello, self.stage.program(task)
        if task.kind == "evaluate":
            payload = make_evaluation_payload(program, hello.test_samples, hello.test_samples, None)
        else:
            updates = self.upload(task) if tensors is None else tensors
            payload = make_training_payload(updates, hello.train_samples, 0.5, measures_largest=program.is_sum_coded)
        self._payloads[task.round, task.kind] = payload
        return Result(task.run, task.round, task.kind, 0, {}, ResourceUse())

    def _on_received(self, payload: bytes) -> None:
        super()._on_received(payload)
        message = self.heard[-1]
        if isinstance(message, SumQuestion):
            self._answer_sum(message)

    def _answer_sum(self, message: SumQuestion) -> None:
        key = message.sum.round, message.sum.kind
        part = self._parts.setdefault(key, MemoryDevice(self.name, Vector.zeros(0, 0)))
        if isinstance(message, SumInvite):
            part.payload = make_vector(message.sum.kind, self._payloads[key], message.terms, [len(self.name)])
        answer = part.answer(message)
        if isinstance(answer, bytes):
            answer = SumMasked(message.sum, self.blobs.put(answer), answer)
        self.say(answer)
