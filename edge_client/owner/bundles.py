"""A bundle of the device's own model, with its own images to measure it. Imports onnxruntime, which takes seconds."""

import platform
import shutil
import time
from dataclasses import replace

from edge_client.owner.trained import load_own_model
from edge_client.settings import DeviceSettings
from edge_client.storage.models import DeviceModel, DeviceModels
from edge_client.storage.state import read_device_id, split_file, state_folder
from edge_client.work.comparing import count_images
from export.bundle.assemble import Precision
from export.bundle.read import can_open
from export.bundle.write import Bench, TrainedModel, write_bundle
from fedvit.data.folder import DeviceData
from fedvit.data.split import KeptSplit, RandomSplit
from fedvit.errors import ConfigError
from fedvit.policy import describe_policy
from profiles.probes.host import usable_cores


def load_model(settings: DeviceSettings, run: str, round: str | int | None = None) -> tuple[TrainedModel, Bench]:
    """Load the device's model of a run, and the images that a bundle is measured with. Raises ConfigError.

    `round`: see `load_own_model`.
    """
    folder = state_folder(settings.data, settings.state)
    if not (folder / "device-id").is_file():
        raise ConfigError("FV1411", f"no state of a device in {folder}; --state names another folder")
    split = KeptSplit.load(split_file(folder), settings.test_share) or RandomSplit(settings.test_share)
    images = DeviceData.open(settings.data, split=split) if settings.data else None
    trained, labelled = load_own_model(
        run,
        device=read_device_id(folder / "device-id"),
        state=folder,
        data=images,
        threads=settings.threads,
        vault_key=settings.vault_key,
        round=round,
    )
    if labelled:
        trained = replace(trained, training=count_images(labelled, next(describe_policy(settings.policy))))
    bench = Bench(
        images=labelled.test if labelled else None,
        described="of the device's own test images",
        threads=settings.threads,
        machine=platform.machine(),
        cores=usable_cores(),
        training=labelled.train if labelled else None,
    )
    return trained, bench


def add_model(
    settings: DeviceSettings, run: str, round: str | int | None = None, precision: Precision = Precision.FP32
) -> DeviceModel:
    """Write a bundle of the device's model of a run, and list it. One that does not answer replaces that of its name.

    A damaged one is mended in any state. `round`: see `load_own_model`. Raises ConfigError, also for a whole model that
    answers or has answered; StorageFailed.
    """
    trained, bench = load_model(settings, run, round)
    if form := trained.batch.labels:
        raise ConfigError("FV2492", f"run {run!r} is of task {form.task}: its answers are not one class, to be served")
    origin = trained.origin
    model = DeviceModel(
        run=origin.run, round=origin.round, method=origin.method, state="trained", changed_s=time.time()
    )
    models = DeviceModels(state_folder(settings.data, settings.state))
    listed = models.read().get(model.name)
    is_in_use = listed is not None and listed.state not in ("trained", "challenger")
    if listed and is_in_use and can_open(models.path(model.name), settings.threads):
        raise ConfigError(
            "FV1491", f"{model.name} is this device's {listed.state} and keeps its bundle; --round names another round"
        )
    bundle = models.new_folder()
    try:
        write_bundle(bundle, trained, bench, precisions=[precision])
        return models.add(model, bundle, mends=True)
    finally:
        shutil.rmtree(bundle, ignore_errors=True)
