"""The server of a simulation on torch: its state and the devices' uploads are in memory."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import msgspec

from coordinator.compute.checkpoint import load_state, save_state
from coordinator.compute.messages import NextState
from coordinator.compute.planning.planner import Plan
from coordinator.compute.planning.server_data import read_server_images
from coordinator.compute.references import references
from coordinator.compute.screening import Screen
from coordinator.compute.server_step import aggregator_of, name_figures
from coordinator.record.privacy import PrivacyStep, round_figures
from coordinator.record.record import Record
from coordinator.record.tables import SUM, Reference, RefusalRecord, ResultRecord, SavedState
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.sum_terms import describe_training, find_denominator, find_largest, find_noise, make_terms
from fedvit.blobs import BlobStore
from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, Upload
from fedvit.program import LABELS
from fedvit.secure.keys import KEY_BYTES, MaskStream
from fedvit.secure.layout import Layout, add_plainly, make_training_payload, read_training
from fedvit.secure.noise import NoiseShare, find_ratio
from fedvit.tensors import Array, Tensors, pack, unpack
from fedvit.updates import Decoded
from fleet.engines.devices import DeviceResult
from fleet.engines.trainer import TorchTrainer

UNSAVED = SavedState({}, None, {})
"""Stands for the state of a round, which is saved with the next checkpoint."""


class TorchServer:
    """The server steps of one run."""

    def __init__(self, run: str, store: Record, plan: Plan, blobs: BlobStore, trainer: TorchTrainer) -> None:
        self.state = plan.state
        self._run, self._store, self._plan, self._blobs = run, store, plan, blobs
        self._trainer = trainer
        self._screen = Screen.of(trainer.config.robust)
        self._images = read_server_images(trainer.config, plan.method, plan.vit)
        self._sent: dict[str, Reference] = {}
        self._uploads: dict[str, Tensors] = {}  # those that the server's rule keeps for later rounds, by digest
        self._largest: float | None = None  # in the newest sum, if it has a codec
        self._unsaved: set[str] = set()  # names of those that no checkpoint holds, instead of digests
        self._send_state()

    def step(self, opened: OpenRound, results: list[ResultRecord]) -> NextState:
        """Update the state. Raises EmptyCohort when no device has a result."""
        config, plan, number, trained = self._trainer.config, self._plan, opened.number, self._trainer.trained
        if not results:
            first = trained[0]
            raise EmptyCohort("FV1501", f"round {number}: no device returned a result; {first.device}: {first.failure}")
        self._trainer.show(f"round {number}/{config.rounds}: server step")
        uploads = []
        for one in trained:
            if one.upload:
                name = f"{one.device}/{number}"
                self._uploads[name] = one.upload
                self._unsaved.add(name)
                lr = plan.method_for(one.device, number).lr
                load = partial(self._load, name)
                uploads.append(Upload(one.device, one.samples, name, load, steps=one.steps, lr=lr))
        added = dict[str, float]()
        if config.secure:
            upload, added = self._add_up(opened, [one for one in trained if one.upload])
            uploads = [upload]
        screened = self._screen.apply(uploads)
        for device, reason in screened.outliers:
            self._store.devices.add_refusal(self._run, RefusalRecord(number, device, "train", f"left out: {reason}"))
            if self._trainer.quarantine.strike(device, number, reason):
                self._trainer.report(f"{device} is in quarantine: {reason}")
        quarantined = self._store.strikes.read_current_quarantines(self._run, number) if screened.outliers else {}
        older = {device: kept for device, kept in self.state.uploads.items() if device not in quarantined}
        context = RoundContext(
            round=number,
            seed=config.seed,
            lr_scale=plan.method.lr_scale(number, config.rounds),
            vit=plan.vit,
            accelerator=self._trainer.devices.accelerator,
            load=self._load,
            progress=self._trainer.show,
            aggregator=aggregator_of(config, number),
            precision=config.server_precision,
            images=self._images,
        )
        self.state, figures = plan.rule.close(replace(self.state, uploads=older), screened.uploads, context)
        self._uploads = {name: self._uploads[name] for name in self.state.uploads.values()}
        self._send_state()
        rows = [len(one.upload[LABELS]) for one in trained if LABELS in one.upload]
        population, cohort = opened.drawn or (len(trained), len(trained))
        noise = added.get("noise_multiplier") or config.privacy.noise_multiplier
        private = round_figures(self._store, self._run, config, PrivacyStep(noise, population, cohort), rows)
        figures = figures | screened.figures | private | name_figures(added)
        return NextState(saved=UNSAVED, figures=figures, damaged={}, needed=set())

    def _add_up(self, opened: OpenRound, trained: list[DeviceResult]) -> tuple[Upload, dict[str, float]]:
        """Add up the updates as integers, as the devices of a secure sum do.

        Returns the mean as one upload, and the figures of the sum.
        """
        config, number, program = self._trainer.config, opened.number, next(iter(opened.work.values())).program
        payloads = {
            one.device: make_training_payload(
                one.upload, one.samples, one.loss or 0.0, measures_largest=program.is_sum_coded
            )
            for one in trained
        }
        layout = Layout.of_program(program, "train")
        images, devices, denominator = max(one.images for one in trained), len(trained), find_denominator(config)
        find = self._store, self._run, config, number
        # the record has the round before only after a checkpoint, which a run resumes from
        largest = find_largest(*find) if self._largest is None else self._largest
        terms = make_terms(layout, config, devices, images, find_noise(*find), largest)

        def make_noise() -> NoiseShare | None:
            stream = MaskStream(secrets.token_bytes(KEY_BYTES))
            return NoiseShare(find_ratio(devices, terms.neighbours), stream) if terms.noise else None

        vector = add_plainly(payloads, terms, config.seed, number, make_noise)
        total = read_training(layout, vector, terms, denominator)
        figures = describe_training(total, terms, denominator, began=devices, summed=devices)
        self._largest = figures.get("largest")
        name = f"{SUM}/{number}"
        self._uploads[name] = total.mean
        return Upload(SUM, total.samples, name, partial(self._load, name)), {"devices": float(devices), **figures}

    def _send_state(self) -> None:
        """Let devices start from the state, coded as the coordinator sends it."""
        groups = self._plan.groups.items()
        members = {group: {name: self.state.tensors[name] for name in names} for group, names in groups}
        self._sent = references(members, self._sent, self._trainer.config.updates, self._blobs)
        self._trainer.devices.start_from(self.state, self._sent)

    def save(self) -> SavedState:
        """Save the state and the uploads that the rule keeps; the record names them afterwards."""
        uploads: dict[str, str] = {}
        for device, name in self.state.uploads.items():
            uploads[device] = name
            if name in self._unsaved:
                uploads[device] = self._blobs.put(pack(self._uploads[name])).digest
                self._uploads[uploads[device]] = self._uploads.pop(name)
        self._unsaved.clear()
        self.state = replace(self.state, uploads=uploads)
        saved = save_state(self.state, self._plan.groups, self._blobs)
        return msgspec.structs.replace(saved, references=self._sent)

    def restore(self, saved: SavedState) -> None:
        """Continue from a saved state."""
        self.state = load_state(saved, self._blobs, self._plan.values)
        self._uploads = {digest: unpack(self._blobs.get(digest)) for digest in saved.uploads.values()}
        self._sent = saved.references
        self._trainer.devices.start_from(self.state, self._sent)

    def _load(self, name: str) -> Mapping[str, Array]:
        return Decoded(self._uploads[name], {name: value.shape for name, value in self._plan.values.items()})
