"""The options of `edge-client`, many of which its commands accept, too."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edge_client.settings import DeviceSettings
from edge_client.storage.state import state_base
from edge_client.trust.policy import load_policy
from fedvit import monitoring
from fedvit.command_line import LOG_FORMAT, SectionOption, amount
from fedvit.errors import ConfigError
from fedvit.labels import parse_label
from fedvit.quantities import parse_bytes, parse_celsius, parse_flops, parse_seconds
from fedvit.transport.address import Address
from fedvit.wire.messages import MAX_LABELS

HOME_VARIABLE = "FEDVIT_HOME_BROKER"
BROKER_VARIABLE = "FEDVIT_BROKER"
"""In the environment: the broker's address, which may hold a password that a command line would show to all users."""


def _labels(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Raises ConfigError naming the label that cannot be used."""
    labels = dict[str, str]()
    for text in texts:
        key, value = parse_label(text)
        if labels.setdefault(key, value) != value:
            raise ConfigError(
                "FV1415", f"--label {text!r}: {key} has the value {labels[key]!r} already; give each key once"
            )
    if len(labels) > MAX_LABELS:
        raise ConfigError("FV1415", f"{len(labels)} labels are given with --label, a device can have {MAX_LABELS}")
    return labels


def _keep_home_password(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    """Read the password of the home's broker. Raises ConfigError if there is none."""
    if file is None:
        return
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FV1471", f"the password of the home's broker in {file} cannot be read: {error}") from error
    context.meta[HOME_VARIABLE] = password


def _read_home(context: click.Context, option: click.Parameter, text: str | None) -> Address | None:
    """Read the address of the home's broker. Raises ConfigError."""
    if not text:
        return None
    try:
        address = Address.parse(text)
    except ConfigError as error:
        raise ConfigError(error.code, f"--home: {error}") from error
    if password := context.meta.get(HOME_VARIABLE):
        if address.user is None:
            raise ConfigError("FV1471", "--home-password-file needs a user in --home: mqtt://USER@HOST")
        return replace(address, password=password)
    if address.password and context.get_parameter_source(str(option.name)) == ParameterSource.COMMANDLINE:
        click.echo(
            "warning: other users of this machine can read the password of --home; use --home-password-file, or set "
            f"{HOME_VARIABLE}",
            err=True,
        )
    return address


_WATCHING = "Watching the device"
_DECLINING = "When the device declines or stops a task"
_SENDING = "What may leave the device"
_PATH = click.Path(path_type=Path)


def _amount(
    flag: str, parse: Callable[[str], float], metavar: str, text: str, section: str = "Budgets"
) -> SectionOption:
    """An option with a unit."""
    return SectionOption([flag], section=section, callback=amount(parse), metavar=metavar, help=text)


OPTIONS = (
    SectionOption(
        ["--broker"],
        envvar=BROKER_VARIABLE,
        metavar="HOST[:PORT]",
        help="MQTT broker; also mqtt://USER:PASSWORD@HOST:PORT and mqtts://... Or set FEDVIT_BROKER, which other "
        "users of this machine cannot read. By default the broker of the joined deployment, else localhost.",
    ),
    SectionOption(
        ["--data"],
        type=_PATH,
        help="Folder with train/CLASS/ and test/CLASS/ images, or CLASS/ alone.",
    ),
    SectionOption(
        ["--id", "device"], metavar="NAME", help="Name of this device; by default generated once and stored in --state."
    ),
    SectionOption(
        ["--state"],
        type=_PATH,
        envvar="FEDVIT_STATE",
        help="Folder for personal tensors and unsent results; by default one per data folder. Or set FEDVIT_STATE.",
    ),
    SectionOption(
        ["--threads"],
        type=click.IntRange(min=1),
        help="Threads that training may use; by default one for each fast core.",
    ),
    SectionOption(
        ["--provider"],
        default="CPUExecutionProvider",
        metavar="NAME",
        help="Execution provider of onnxruntime; else the CPU. CUDAExecutionProvider on a Jetson is not tried.",
    ),
    SectionOption(
        ["--federation"],
        help="Which federation at the broker to join. By default that of the joined deployment, else home.",
    ),
    SectionOption(["--ca-file"], type=_PATH, help="Certificate authority of an mqtts:// broker."),
    SectionOption(
        ["--test-share"],
        type=click.FloatRange(0, 0.9),
        default=0.2,
        help="Share of test images if the data folder has no train/ and test/.",
    ),
    SectionOption(
        ["--policy"],
        section=_SENDING,
        type=_PATH,
        help="File with the owner's policy, by default policy.toml in --state; flags override its keys.",
    ),
    SectionOption(
        ["--updates"],
        section=_SENDING,
        metavar="none|sum|single",
        help="Updates of a model that the device may send; sum: only inside a sum over devices. By default single.",
    ),
    SectionOption(
        ["--features"],
        section=_SENDING,
        metavar="none|masked|any",
        help="Features of images that it may send; masked: with --min-mask of the patches left out. By default masked.",
    ),
    SectionOption(
        ["--min-mask"], section=_SENDING, type=float, metavar="SHARE", help="See --features. By default 0.5."
    ),
    SectionOption(
        ["--class-counts/--no-class-counts"],
        section=_SENDING,
        default=None,
        help="Send with an evaluation how many test images each class has, and how many were recognised. By default "
        "not.",
    ),
    _amount(
        "--max-bytes-per-day",
        parse_bytes,
        "BYTES",
        "Results of 24 hours, e.g. 200MB: above it tasks are declined.",
        section=_SENDING,
    ),
    SectionOption(
        ["--methods"],
        section=_SENDING,
        metavar="known|checked",
        help="known: graphs of fedvit itself and of the trusted publisher; checked: all that pass the device's "
        "checks. By default known if a publisher is trusted.",
    ),
    SectionOption(
        ["--publisher"],
        section=_SENDING,
        metavar="KEY",
        help="Public key of the publisher whose graphs the device runs, by default the one of the join token.",
    ),
    _amount(
        "--memory-budget",
        parse_bytes,
        "BYTES",
        "Resident memory of the whole process that a task may take, e.g. 512MB.",
    ),
    _amount(
        "--disk-budget",
        parse_bytes,
        "BYTES",
        "Disk space that the state may take: personal tensors, results and blobs, e.g. 2GB. By default half of what is "
        "free.",
    ),
    _amount("--flops-budget", parse_flops, "FLOP", "Work that a round's training may take, e.g. 2TFLOP."),
    _amount(
        "--round-deadline",
        parse_seconds,
        "TIME",
        "Time that a round's training may take on this device, without transfers, e.g. 10m.",
    ),
    _amount("--upload-budget", parse_bytes, "BYTES", "Size of a round's result, e.g. 5MB."),
    _amount(
        "--temperature-limit",
        parse_celsius,
        "CELSIUS",
        "Stop a task when the processor is hotter than this, e.g. 80.",
        section=_DECLINING,
    ),
    _amount(
        "--max-temperature",
        parse_celsius,
        "CELSIUS",
        "Decline a task while the processor is hotter than this, e.g. 65; asked again later.",
        section=_DECLINING,
    ),
    SectionOption(
        ["--min-battery"],
        section=_DECLINING,
        type=click.IntRange(0, 100),
        metavar="PERCENT",
        help="Decline a task while the battery holds less and no charger is connected.",
    ),
    SectionOption(
        ["--busy-file"],
        section=_DECLINING,
        type=_PATH,
        help="Decline a task while this file exists.",
    ),
    SectionOption(
        ["--label", "labels"],
        multiple=True,
        envvar="FEDVIT_LABELS",
        callback=_labels,
        metavar="KEY=VALUE",
        help="Label of this device, e.g. site=berlin; repeatable. Or set FEDVIT_LABELS to "
        "several, with spaces between them.",
    ),
    SectionOption(
        ["--quiet-hours"],
        section=_DECLINING,
        metavar="HH:MM-HH:MM",
        help="Decline a task at this time of day, e.g. 22:00-06:30.",
    ),
    SectionOption(
        ["--hours"], section=_DECLINING, metavar="HH:MM-HH:MM", help="Decline a task at all other times of day."
    ),
    SectionOption(
        ["--vault-key"],
        type=_PATH,
        help="Encrypt personal tensors with the key in this file, which is created if it is missing.",
    ),
    SectionOption(["--profile"], is_flag=True, help="Measure the compute speed at the start if it is not known yet."),
    SectionOption(
        ["--keep-features/--no-keep-features", "keep_features"],
        default=None,
        help="Keep features of layers that a task does not train in the state, within --disk-budget, instead of making "
        "them again in each epoch. By default they are kept.",
    ),
    SectionOption(
        ["--keep-runs"],
        type=click.IntRange(min=1),
        metavar="N",
        help="Remove the vaults of finished runs that are older than the newest N runs of this device, whenever a run "
        "has finished. By default 10.",
    ),
    SectionOption(["--once"], is_flag=True, help="Exit when the run has ended instead of waiting for the next."),
    SectionOption(["--quiet"], is_flag=True, help="Log warnings and errors only."),
    SectionOption(["--prometheus", "metrics_address"], section=_WATCHING, **monitoring.OPTION),
    SectionOption(["--prometheus-password-file"], section=_WATCHING, **monitoring.PASSWORD_OPTION),
    SectionOption(
        ["--home"],
        section=_WATCHING,
        envvar=HOME_VARIABLE,
        callback=_read_home,
        metavar="mqtt://USER@HOST",
        help="Broker of this home: Home Assistant shows the device there, with its round, accuracy and sensors. Or set "
        f"{HOME_VARIABLE}, also with a password.",
    ),
    SectionOption(
        ["--home-password-file"],
        section=_WATCHING,
        envvar="FEDVIT_HOME_PASSWORD_FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_keep_home_password,
        is_eager=True,  # before --home
        expose_value=False,
        help="File with the password for --home.",
    ),
    SectionOption(["--log-format"], section=_WATCHING, **LOG_FORMAT),
    SectionOption(
        ["--logs/--no-logs", "sends_logs"],
        section=_WATCHING,
        default=None,
        help="Send the last log lines with the failure of a task, without paths of images and class names.",
    ),
)
"""Options of `edge-client`, which are given before the name of a command."""


def program_options(*names: str) -> list[click.Parameter]:
    """Return options of `edge-client` that a command accepts after its own name, too; there they take precedence."""
    options: list[click.Parameter] = []
    for option in OPTIONS:
        if option.name in names:
            again = copy.copy(option)
            again.default = again.envvar = None  # read by the option of the program
            options.append(again)
    return options


def read_settings(context: click.Context, own: Mapping[str, Any]) -> DeviceSettings:
    """Return the settings from the options before a command's name and, in `own`, after it. Raises ConfigError."""
    before = context.parent.params if context.parent else {}
    return make_settings({**before, **{name: value for name, value in own.items() if value is not None}})


def make_settings(flags: Mapping[str, Any]) -> DeviceSettings:
    """Return the settings from the options and the policy of the device. Raises ConfigError."""
    return DeviceSettings.from_flags(flags, load_policy(flags["state"] or state_base(), flags["policy"], flags))


DEVICE_OPTIONS = (
    "broker", "data", "device", "state", "federation", "ca_file", "policy", "memory_budget", "temperature_limit",
)  # fmt: skip
"""Options of commands that examine the device."""
