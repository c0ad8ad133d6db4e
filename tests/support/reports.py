"""Reports made by hand: EFTViT on a ViT-B on five boards, and a run of four devices."""

from typing import Any

import msgspec

from coordinator.record.tables import DeviceTotals
from coordinator.run_view import RoundView, RunView, view_device
from coordinator.views.report.document import (
    ClassAccuracy,
    CountedRefusal,
    DeviceReport,
    DeviceRound,
    RunPrivacy,
    RunReport,
)
from fedvit.resources import Budget, ResourceUse
from profiles.catalogue import load
from profiles.predict import Target, predict
from profiles.prediction import Expected, FlopShare, GraphWork, MemoryPhase, Prediction, ProductWork, ProgramCost
from profiles.report.curves import Accuracy, RoundFigures
from profiles.report.document import ProfiledDevice, ProfileDocument, ProfiledVariant, PublishedFigure
from profiles.report.experiment import CellOutcome, CellResult, ExperimentOutcome, MethodComparison

MADE_AT = "2026-11-22T08:00:00.000+00:00"
BATCH = 32
WIDTH = 768
DEPTH = 12


def block_flops(tokens: int) -> int:
    """Forward, of one image: 2 x (12 n D^2 + 2 n^2 D)."""
    return 2 * (12 * tokens * WIDTH**2 + 2 * tokens**2 * WIDTH)


def cost(mask: float, local_blocks: int) -> ProgramCost:
    """EFTViT's by its closed form: (2 L + M) blocks, of which L forward."""
    tokens = 1 + int(196 * (1 - mask))
    one = BATCH * block_flops(tokens)
    shares = [
        FlopShare(
            block=f"block {block}",
            kind="attention and mlp",
            forward=one,
            backward=one * (2 if block < local_blocks else 1),
            trained=block < local_blocks,
        )
        for block in range(DEPTH)
    ]
    head = FlopShare(block="head", kind="head", forward=BATCH * 15_360, backward=2 * BATCH * 15_360, trained=True)
    forward, backward = DEPTH * one + head.forward, (DEPTH + local_blocks) * one + head.backward
    trained = 743_424 + local_blocks * 7_087_872 + 7_690
    frozen = 85_806_346 - trained
    product = ProductWork(
        "weights", 1, BATCH * tokens, WIDTH, WIDTH, (forward + backward) / (2 * BATCH * tokens * WIDTH**2)
    )
    answer = ProductWork("weights", 1, 197, WIDTH, WIDTH, DEPTH * block_flops(197) / (2 * 197 * WIDTH**2))
    weights, values = {"weights": 4 * frozen}, {"trained": 4 * 4 * trained}
    batches = {"images": 40_000_000}
    features = 500 * tokens * WIDTH * 4
    return ProgramCost(
        method="eftvit", model="vit_base_patch16_224", options={"mask": mask, "local_blocks": local_blocks},
        batch_size=BATCH, run_size=8, kept_patches=tokens - 1, mask_ratio=mask, parameters_trained=trained,
        parameters_frozen=frozen, parameters_local=trained - 7_690, flops_forward=forward, flops_backward=backward,
        flops=[*shares, head], flops_evaluate=DEPTH * block_flops(197),
        step_work=GraphWork(products=[product], moved_bytes={"Add": 2e9}, nodes=2500),
        answer_work=GraphWork(products=[answer], moved_bytes={"Add": 2e8}, nodes=400),
        answer_size=1, steps=80, images=500,
        test_images=100, flops_round=80 * (forward + backward), bytes_once=63_000_000, bytes_down=4 * frozen,
        bytes_up=features,
        memory=[
            MemoryPhase(
                phase="train", parts=weights | values | {"activations": 8 * tokens * WIDTH * 4 * 135} | batches
            ),
            MemoryPhase(phase="upload", parts=weights | values | {"features": 2 * features}),
            MemoryPhase(phase="evaluate", parts=weights | {"activations": 120_000_000, "images": 20_000_000}),
        ],
    )  # fmt: skip


def prediction(cost: ProgramCost, device: str, mode: str | None = None, **budget: Any) -> Prediction:
    """On a board of the catalogue, whose memory is a budget, too."""
    board = load(device)
    limits = board.budget().tightest(Budget(**budget))
    return predict(cost, board.speed(mode), Target(device, "catalogue", mode, board.power_w(mode)), limits)


def profile_document(
    devices: tuple[tuple[str, str | None], ...] = (
        ("rpi-zero2w", None), ("rpi4b-2", "1.8GHz"), ("rpi5-8", None), ("agx-orin-64", "50W"), ("thor-t5000", None),
    ),
    masks: tuple[float, ...] = (0.5, 0.75),
    splits: tuple[int, ...] = (2, 4),
    **budget: Any,
) -> ProfileDocument:  # fmt: skip
    """Four variants on five boards, with a deadline of an hour unless another budget is given."""
    budget = budget or {"round_deadline_s": 3600.0}
    costs = [cost(mask, split) for split in splits for mask in masks]
    published = PublishedFigure(
        figure="forward pass, mask 0.75 (EFTViT, Table 4)", unit="GMAC", published=2.997, reproduced=2.9977, ours=4.413,
        convention="without the projections of attention; norms at 5 per element; every patch embedded",
        source="arXiv:2412.00334",
    )  # fmt: skip
    return ProfileDocument(
        title="eftvit on vit_base_patch16_224",
        created_at=MADE_AT,
        software="fedvit 0.1.0",
        images=500,
        test_images=100,
        variants=[
            ProfiledVariant(label=f"mask {one.mask_ratio}, M={one.options['local_blocks']}", cost=one) for one in costs
        ],
        devices=[
            ProfiledDevice(
                id=id,
                name=load(id).name,
                source="catalogue",
                mode=mode,
                budget=load(id).budget().tightest(Budget(**budget)),
                predictions=[prediction(one, id, mode, **budget) for one in costs],
                warnings=[f"not verified: {', '.join(load(id).doubts(mode))}"],
            )
            for id, mode in devices
        ],
        published=[published],
        warnings=["Energy is modelled: training time x power under load."],
    )


def use(device: int, number: int, **broke: Any) -> ResourceUse:
    """What a device measured in a round; the second has no energy sensor."""
    step_s = (12.0, 4.0, 4.4, 1.3)[device] * (1 + 0.02 * number)
    return ResourceUse(
        train_s=80 * step_s, step_s=step_s, steps=80, flops=80 * 600 * 10**9,
        peak_rss_bytes=880_000_000 + 10**7 * number,
        received_bytes=283_000_000, sent_bytes=77_000_000, energy_j=None if device == 1 else 800 * step_s, **broke,
    )  # fmt: skip


def private_report(**asked: Any) -> RunReport:
    """A run with noise of both kinds, three rounds, of which the second accepted no device."""
    report = run_report(predicted=False, rounds=3)
    spent = [(2.5, 1.0, 40.0, 40.0), (2.5, None, None, None), (4.0, 1.0, 50.0, 75.0)]
    rounds = [
        msgspec.structs.replace(entry, epsilon=updates, row_epsilon=row, upload_epsilon=upload, device_epsilon=device)
        for entry, (updates, row, upload, device) in zip(report.run.rounds, spent, strict=True)
    ]
    privacy = {"noise_multiplier": 1.5, "clip": 0.5, "feature_noise": 0.25, "feature_clip": 8.0, "delta": 1e-4, **asked}
    return msgspec.structs.replace(with_run(report, rounds=rounds), privacy=RunPrivacy(**privacy))


def with_run(report: RunReport, **changes: Any) -> RunReport:
    """The report of the same run with other values."""
    return msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, **changes))


def run_report(predicted: bool = True, rounds: int = 12) -> RunReport:
    """Four devices; "pi-c" dropped out of round 3, "pi-a" broke its budget of time in round 5."""
    names = ("pi-a", "pi-b", "pi-c", "orin-in-the-laboratory-on-the-second-floor")
    boards = ("rpi4b-2", "rpi5-8", "rpi5-8", "agx-orin-64")
    one = cost(0.75, 2)
    devices = []
    for place, (name, board) in enumerate(zip(names, boards, strict=True)):
        entries = []
        for number in range(1, rounds + 1):
            late = name == "pi-a" and number == 5
            missing = name == "pi-c" and number == 3
            expected = Expected(
                prediction=prediction(one, board),
                flops=one.flops_round,
                bytes_down=one.bytes_down,
                bytes_up=one.bytes_up,
                budget=Budget(memory_bytes=10**9, round_deadline_s=1000.0),
            )
            entries.append(
                DeviceRound(
                    round=number,
                    status="dropped out" if missing else "accepted",
                    expected=expected if predicted else None,
                    measured=None if missing else use(place, number, broke=("time",) if late else ()),
                    accuracy=0.9 - 0.6 / number + 0.02 * place,
                    reason="no result: deadline" if missing else None,
                )
            )
        totals = DeviceTotals(
            train_samples=500, test_samples=100, accuracy=entries[-1].accuracy, bytes_down=rounds * 283_000_000,
            bytes_up=rounds * 77_000_000, peak_rss_bytes=990_000_000,
        )  # fmt: skip
        devices.append(DeviceReport(totals=view_device(name, totals), rounds=entries))
    run = RunView(
        run="20261122-081500-eftvit-ab12", created_at="2026-11-22T06:15:00.000+00:00", status="finished", reason=None,
        method="eftvit", model="vit_base_patch16_224", seed=7, rounds_planned=rounds,
        protocol="newest tensors from the server + own local tensors, each device's own test images",
        settings={"devices": 4, "options.mask": 0.75, "classes": [f"class {number}" for number in range(100)]},
        rounds=[
            RoundView(
                round=number, cohort=4, accepted=3 if number == 3 else 4, accuracy_mean=0.93 - 0.6 / number,
                accuracy_lowest=0.9 - 0.6 / number, accuracy_highest=0.96 - 0.6 / number,
                accuracy_weighted=0.93 - 0.6 / number, train_loss=2.0 / number, bytes_down=4 * 283_000_000,
                bytes_up=4 * 77_000_000, devices_s=1000.0, server_s=41.0, accuracy={}, figures={},
            )
            for number in range(1, rounds + 1)
        ],
        classes=(), devices=[device.totals for device in devices], refusals=[], mean_accuracy=0.93 - 0.6 / rounds,
        bytes_down=0, bytes_up=0, max_edge_rss_bytes=None,
    )  # fmt: skip
    return RunReport(
        run=run,
        created_at=MADE_AT,
        software="fedvit 0.1.0",
        devices=devices,
        refusals=[
            CountedRefusal(
                round=None, device="pi-x", kind="hello", times=3,
                reason="its class folder [wasp] is <b>unknown</b>: the run's classes are ant, bee",
            )
        ],
        dropouts=[CountedRefusal(round=3, device="pi-c", kind="train", reason="no result: deadline", times=1)],
        warnings=["pi-b has no energy sensor: its energy was not measured."],
    )  # fmt: skip


def fleet_report(devices: int) -> RunReport:
    """A run of many devices over three rounds, which all broke a budget; their accuracies are 0.4 to 0.9."""
    few = run_report(rounds=3)
    entries = [
        msgspec.structs.replace(entry, measured=use(0, entry.round, broke=("time",) if entry.round == 1 else ()))
        for entry in few.devices[0].rounds
    ]
    totals = few.devices[0].totals
    return msgspec.structs.replace(
        few,
        duration_s=5400.0,
        devices=[
            DeviceReport(
                totals=msgspec.structs.replace(
                    totals, device=f"pi-{place}", accuracy=round(0.4 + 0.1 * (place % 6), 1)
                ),
                rounds=entries,
            )
            for place in range(devices)
        ],
        classes=[
            ClassAccuracy(name="ant", devices=300, images=400, correct=300, wrong={"bee": 80, "wasp": 20}),
            ClassAccuracy(name="bee", devices=50, images=100, correct=90, wrong={"ant": 10}),
        ],
    )


def experiment_outcome() -> ExperimentOutcome:
    """Two methods on two partitions, one seed, three rounds; one cell is not finished."""
    methods, partitions = ("fedavg", "a-method-with-quite-a-long-name"), ("even", "dirichlet-0.1-over-twenty-devices")

    def result() -> CellResult:
        accuracies = [Accuracy(mean=0.3 * number, std_over_devices=0.1, weighted=0.3) for number in (1, 2, 3)]
        return CellResult(
            digest="", software="1", protocol="p", accuracy=accuracies[-1],
            accuracy_by_device={f"device-{number}": 0.1 * number for number in range(10)}, wall_s=10.0, bytes_down=2e6,
            bytes_up=1e6, flops=None, peak_rss_bytes=None, refusals=0,
            rounds=[
                RoundFigures(
                    round=number, cohort=2, accepted=2, accuracy=accuracy, train_loss=None, bytes_down=2e6,
                    bytes_up=1e6, flops=None, took_s=2.0,
                )
                for number, accuracy in enumerate(accuracies, start=1)
            ],
        )  # fmt: skip

    places = [(method, partition) for method in methods for partition in partitions]
    return ExperimentOutcome(
        schema=1, experiment="two methods", description="What the page of an experiment looks like.", protocols=["p"],
        settings={"rounds": 3, "partitions": {partition: {"partition": "iid"} for partition in partitions}},
        methods={method: {"lr": 0.1, "options": ["x" * 60, "y" * 60]} for method in methods}, seeds=[0],
        comparisons=[
            MethodComparison(
                method=method, partition=partition, seeds=[0], accuracy=0.9, std_over_seeds=None, std_over_devices=0.1,
                accuracy_weighted=0.9, bytes_down=2e6, bytes_up=1e6, flops=None, wall_s=10.0, peak_rss_bytes=None,
            )
            for method, partition in places[:-1]
        ],
        cells=[
            CellOutcome(
                method=method, partition=partition, seed=0,
                result=result() if (method, partition) != places[-1] else None, failure=None,
            )
            for method, partition in places
        ],
    )  # fmt: skip
