"""What an operator may say, and how it is told what is wrong: key, value, what is allowed, and where."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from coordinator.commands.config_flags import config_flags
from coordinator.commands.start import start
from coordinator.compute.planning.checks import checked_config
from coordinator.config import (
    TABLES,
    BrokerConfig,
    BudgetConfig,
    ImageConfig,
    RunConfig,
    StartConfig,
    UpdatesConfig,
    merge_flags,
    read_toml,
)
from fedvit.errors import ConfigError
from fedvit.methods import METHODS
from fedvit.methods.base import ModelPatch
from fedvit.methods.fedavg import FedAvg
from fedvit.models.prompts import Prompts
from fedvit.resources import Budget
from profiles.probes.host import peak_rss_bytes
from tests.support.codes import has_code

FILE = "conf/run.toml"

EVERY_KEY = """
method = "fedavg"
options = { epochs = 3, lr = 0.5 }
variants = { "jetson-*" = { epochs = 1 } }
model = "vit_small_images"
model_options = { image_size = 16, patch_size = 8, width = 32, depth = 2, heads = 2 }
pretrained = false
start_from = "monday"
start_round = "best"
classes = ["ant", "bee"]
task = "classification"
number_range = []
max_classes = 50
rounds = 7
seed = 5
devices = 3
cohort = 2
quorum = 0.5
over_select = 0.25
selection = "fair"
deadline_s = 60
deadline_limit_s = 3600
rejoin_grace_s = 0
backup_every = 2
keep_rounds = 50
keep_runs = 3
late = "use"
max_staleness = 3
mode = "rounds"
buffer = 5
concurrency = 6
auc = true
evaluate_every = 2
evaluation_cohort = 0.5
evaluation_quorum = 0.25
evaluation = "pre_aggregation"
accelerator = "cpu"
server_precision = "bf16"
federation = "lab-1"
devices_where = "site=berlin"
min_device_version = "0.2"
secure = false

[images]
crop_padding = 4
flip = true
brightness = 0.25
views = 2

[updates]
up = "int8"
up_groups = { model = "fp16" }
down = "top_k:share=0.1"
down_whole = "fp16"
features = "none"

[budget]
memory_budget = "512MB"
flops_budget = 2e12
round_deadline = "10m"
upload_budget = 5_000_000

[promote]
min_gain = 0.01
min_images = 80
canary = "site=berlin"
canary_share = 0.5
after = "12h"
max_worse = 0.1

[robust]
aggregator = "median"
malicious_share = 0.2
clip_norm = "median"
reject_scale = 5
max_weight = 2.5
strikes = 1
quarantine_rounds = 4

[privacy]
noise_multiplier = 0.0
clip = 0.5
clip_quantile = 0.5
clip_rate = 0.1
delta = 1e-4
accounting = "sampled"
feature_noise = 0.0
feature_clip = 3.0
deterministic_noise = true

[sums]
range = 2.5
bits = 24
neighbours = 12
leaving = 0.02
step_s = 60

[alerts]
webhook = "http://127.0.0.1:9000/hook"

[stop]
accuracy = 0.9
patience = 3
seconds = 3600

[trackers]
writers = ["tensorboard", "mlflow"]
mlflow_uri = "http://m:5000"
mlflow_experiment = "ants"

[blobs]
url = "s3://models/fleet"
endpoint = "http://nas:9000"
region = "here"
mirror = true
min_bytes = 1000
fallback_bytes = 2000
url_valid_s = 60

[broker]
broker = "mqtts://pi@h:8883"
listen = "0.0.0.0"
port = 0
password = "secret"
ca_file = "ca.pem"
limits = "aws-iot-core"
max_payload_bytes = 100_000
publishes_per_s = 20
topics_per_subscribe = 4
max_inflight = 10
deployment = "fleet"
"""


@dataclass(frozen=True, kw_only=True)
class Prompted(FedAvg):
    """FedAvg of a model with prompts."""

    tokens: int = 3

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (Prompts(tokens=self.tokens),)


def refusal(**values: Any) -> str:
    """What is said of a configuration that cannot be used."""
    with pytest.raises(ConfigError) as refused:
        checked_config(values, FILE)
    return str(refused.value)


def flagged(*arguments: str, values: dict[str, Any] | None = None) -> StartConfig:
    """The configuration that a command with these flags gets, over a file's values."""
    got: list[dict[str, Any]] = []

    @click.command()
    @config_flags
    def command(**flags: Any) -> None:
        got.append(flags)

    CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    return checked_config(merge_flags(values or {}, got[0]), "flags")


# --- files --------------------------------------------------------------------------------------------


def list_keys(config: StartConfig) -> dict[str, Any]:
    """All keys of a configuration, as a file has them."""
    keys: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config.run))
    del keys["stop"]["epsilon"]  # it needs noise, which late results exclude
    del keys["server_data"]  # it needs a method without robust rules
    return keys | {"broker": msgspec.json.decode(msgspec.json.encode(config.broker))}


def test_every_key_can_be_set_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(EVERY_KEY)
    assert list_keys(checked_config(read_toml(file), str(file))) == tomllib.loads(EVERY_KEY)


def test_configuration_without_keys_is_valid() -> None:
    config = checked_config({}, FILE)
    assert config == StartConfig(RunConfig(), BrokerConfig())
    assert (config.run.method, config.run.rounds, config.run.cohort, config.broker.broker) == (
        "eftvit",
        10,
        1.0,
        "auto",
    )


def test_what_the_store_keeps_gives_the_same_configuration_again() -> None:
    """Also whether `cohort` is a share (1.0: all) or a number (1: one device)."""
    for cohort in (1, 1.0, 0.25, 8):
        config = checked_config({"cohort": cohort, "classes": ["a", "b"], "images": {"flip": True}}, FILE).run
        raw = msgspec.json.encode(msgspec.to_builtins(config))
        again = checked_config(msgspec.json.decode(raw), "run r").run
        assert again == config
        assert type(again.cohort) is type(config.cohort) is type(cohort)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"rounds = 3\nlr = = 1\n", "line 2"),
        (b"rounds = 3\nrounds = 4\n", "line 2"),
        (b"[images\n", "line 1"),
        (b"method = \xff\n", "not TOML"),
    ],
)
def test_what_is_not_toml_is_named_with_its_line(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_toml(file)
    assert str(file) in str(refused.value)
    assert named in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1001")):
        read_toml(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, check=has_code("FV1001")):
        read_toml(tmp_path)


# --- what is wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("rounds", -1, ">= 0"),
        ("rounds", 2.5, "expected `int`, got `float`"),
        ("rounds", "5", "expected `int`, got `str`"),
        ("rounds", True, "expected `int`, got `bool`"),
        ("rounds", 10**20, "64 bits"),
        ("options", {"epochs": 10**20}, "64 bits"),
        ("seed", -1, ">= 0"),
        ("seed", 2**31, "<= 2147483647"),
        ("devices", 0, ">= 1"),
        ("cohort", 0, ">= 1"),
        ("cohort", 0.0, "> 0"),
        ("cohort", 1.5, "<= 1.0"),
        ("cohort", "all", "got `str`"),
        ("quorum", 0.0, "> 0"),
        ("quorum", 1.1, "<= 1.0"),
        ("quorum", float("nan"), "> 0"),
        ("deadline_s", 0, "> 0"),
        ("deadline_s", float("inf"), "<= 1000000000.0"),
        ("rejoin_grace_s", -0.1, ">= 0"),
        ("evaluate_every", 0, ">= 1"),
        ("method", 3, "expected `str`"),
        ("model", ["vit"], "expected `str`"),
        ("options", 3, "a table"),
        ("variants", 3, "a table"),
        ("variants", {"jetson-*": 3}, "a table"),
        ("variants", ["jetson-*"], "a table"),
        ("start_from", 3, "expected `str | null`"),
        ("evaluation", "newer", "invalid value 'newer'; allowed are newest | pre_aggregation; did you mean 'newest'"),
        ("evaluation", 1, "expected `str`"),
        ("model_options", "depth=2", "a table"),
        ("images", 3, "a table"),
        ("classes", "ab", "expected `array`"),
        ("classes", ["a", 1], "expected `str`"),
        ("pretrained", 1, "expected `bool | str`"),
        ("accelerator", 0, "expected `str`"),
        ("server_precision", "fp16", "fp16"),
        ("federation", 7, "expected `str`"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(key: str, value: Any, allowed: str) -> None:
    said = refusal(**{key: value})
    assert said.startswith(f"{FILE}: {key} = {value!r}: ")
    assert allowed in said


@pytest.mark.parametrize(
    ("table", "key", "value", "allowed"),
    [
        ("images", "crop_padding", -1, ">= 0"),
        ("images", "crop_padding", 65, "<= 64"),
        ("images", "flip", 1, "`bool`"),
        ("images", "brightness", 1.0, "< 1.0"),
        ("images", "views", 65, "<= 64"),
        ("broker", "port", 70_000, "<= 65535"),
        ("broker", "port", "1883", "`int`"),
        ("broker", "broker", 3, "`str`"),
        ("broker", "limits", "gcp", "aws-iot-core"),
        ("broker", "max_payload_bytes", 1000, ">= 65536"),
    ],
)
def test_a_value_is_named_with_its_table(table: str, key: str, value: Any, allowed: str) -> None:
    said = refusal(**{table: {key: value}})
    assert said.startswith(f"{FILE} [{table}]: {key} = {value!r}: ")
    assert allowed in said


def test_views_of_images_that_are_not_augmented_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        checked_config({"images": {"views": 3}}, FILE)
    assert refused.value.code == "FV1004"
    assert str(refused.value).startswith(f"{FILE} [images]: views = 3: ")


@pytest.mark.parametrize(
    ("values", "where", "hint"),
    [
        ({"round": 3}, FILE, "did you mean 'rounds'?"),
        ({"dead_line_s": 3}, FILE, "did you mean 'deadline_s'?"),
        ({"images": {"flop": True}}, f"{FILE} [images]", "did you mean 'flip'?"),
        ({"broker": {"prot": 1}}, f"{FILE} [broker]", "did you mean 'port'?"),
        ({"broker": {"xyz": 1}}, f"{FILE} [broker]", "known keys are broker, listen, port, password, ca_file"),
        ({"xyz": 3}, FILE, "known keys are method, options, variants, model"),
    ],
)
def test_an_unknown_key_is_named_with_what_may_have_been_meant(values: dict[str, Any], where: str, hint: str) -> None:
    said = refusal(**values)
    assert said.startswith(f"{where}: unknown key ")
    assert hint in said


def test_the_broker_must_be_a_table() -> None:
    assert refusal(broker="localhost") == (
        f"{FILE}: broker = 'localhost' must be a table: [broker] with broker = \"...\""
    )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"method": "fedavgg"}, ["unknown method 'fedavgg'", "eftvit", "fedavg"]),
        (
            {"method": "fedavg", "options": {"mu": 0.5}},
            ["method 'fedavg' has no option 'mu'", "epochs, batch_size"],
        ),
        ({"method": "fedavg", "options": {"epochs": 0}}, ["option epochs = 0 of method 'fedavg'", ">= 1"]),
        ({"options": {"schedule": "linear"}}, ["option schedule = 'linear' of method 'eftvit'"]),
        ({"options": {"mask": 1.0}}, ["option mask = 1.0 of method 'eftvit'", "< 1.0"]),
        ({"options": {"local_blocks": 6}}, ["local_blocks = 6 must be at most 5", "6 blocks"]),
        ({"model": "vit_tiny_patch16_223"}, ["unknown model 'vit_tiny_patch16_223'", "vit_tiny_patch16_224"]),
        ({"model": "resnet18d"}, ["'resnet18d' is a ResNet, not a plain Vision Transformer"]),
        ({"model_options": {"depht": 2}}, ["'vit_small_images' has no option 'depht'", "depth"]),
        ({"model_options": {"depth": 0}}, ["model option depth = 0", "at least 1"]),
        ({"model_options": {"patch_size": 5}}, ["image_size = 32 is not a multiple of patch_size = 5"]),
        ({"model_options": {"mlp_ratio": "wide"}}, [FILE]),
        ({"pretrained": True}, ["'vit_small_images' has no pretrained weights"]),
        ({"pretrained": "nowhere.safetensors"}, ["pretrained = 'nowhere.safetensors'", "no such file"]),
        (
            {"variants": {"jetson-*": {"epochs": 0}}},
            ["variants: 'jetson-*': option epochs = 0 of method 'eftvit'", ">= 1"],
        ),
        (
            {"variants": {"a": {"epochs": 2}, "pi-[12]": {"lr": "fast"}}},
            ["variants: 'pi-[12]': option lr = 'fast' of method 'eftvit'"],
        ),
        (
            {"variants": {"jetson-*": {"maks": 0.5}}},
            ["variants: 'jetson-*': method 'eftvit' has no option 'maks'", "mask"],
        ),
        (
            {"variants": {"jetson-*": {"local_blocks": 6}}},
            ["variants: 'jetson-*': option local_blocks = 6 must be at most 5", "6 blocks"],
        ),
        (
            {"options": {"optimizer": "adamw"}, "variants": {"old-*": {"momentum": 0.9}}},
            ["variants: 'old-*': option momentum = 0.9 is for sgd"],
        ),
        ({"federation": "a/b"}, ["federation 'a/b'", "1 to 64 letters"]),
        ({"classes": ["ant", "bee", "ant"]}, ["classes: 'ant' is listed more than once"]),
        ({"classes": ["ant"]}, ["classes", "at least two", "'ant'"]),
    ],
)
def test_names_and_options_are_checked_before_anything_starts(values: dict[str, Any], named: list[str]) -> None:
    said = refusal(**values)
    assert said.startswith(f"{FILE}: ")
    assert "\n" not in said
    for text in named:
        assert text in said


def test_what_is_added_to_the_model_is_the_same_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one model on the server: a variant that wants prompts, or others, is refused."""
    monkeypatch.setitem(METHODS, "prompted", Prompted)
    assert checked_config({"method": "prompted", "variants": {"pi": {"tokens": 3, "lr": 0.5}}}, FILE)
    said = refusal(method="prompted", variants={"jetson-*": {"tokens": 4}})
    assert said == f"{FILE}: variants: 'jetson-*': {{'tokens': 4}} adds other tensors to the model than the run does"


def test_a_large_model_is_checked_without_taking_memory() -> None:
    """ViT-H/14 has 632 million parameters: 2.5 GB of float32, of which the check takes no tenth."""
    checked_config({}, FILE)  # imports torch and timm
    before = peak_rss_bytes()
    assert checked_config({"model": "vit_huge_patch14_224"}, FILE).run.model == "vit_huge_patch14_224"
    after = peak_rss_bytes()
    assert before is not None
    assert after is not None
    assert after - before < 250e6


# --- flags --------------------------------------------------------------------------------------------


def test_every_key_has_a_flag_and_a_description() -> None:
    flags = {option.name: option for option in start.params if isinstance(option, click.Option)}
    for table, kind in (
        ("", RunConfig),
        ("broker.", BrokerConfig),
        *((f"{key}.", kind) for key, kind in TABLES.items()),
    ):
        for key in kind.__struct_fields__:
            if key not in TABLES:  # tables: their keys are flags
                assert len(flags[table + key].help or "") > 15, key
    shown = CliRunner().invoke(start, ["--help"], terminal_width=200).output
    for flag in (
        "--method",
        "-o, --option KEY=VALUE",
        "--variant DEVICES:KEY=VALUE",
        "--class NAME",
        "--images.flip / --images.no-flip",
        "--deadline-s auto|NUMBER",
        "--pretrained true|FILE",
        "--budget.memory-budget AMOUNT",
        "--updates.up-group GROUP=CODEC",
        "--trackers.writer mlflow|tensorboard",
        "--broker TEXT",
        "--broker.port NUMBER",
    ):
        assert flag in shown
    assert "[default: 21600.0]" in shown


def list_words(option: click.Option, value: Any) -> list[str]:
    """The words of a command line that give a key its value."""
    if option.secondary_opts:
        return [option.opts[0] if value else option.secondary_opts[0]]
    texts = value if isinstance(value, list) else [value]
    if isinstance(value, dict):
        inner = {name: entry if isinstance(entry, dict) else None for name, entry in value.items()}
        texts = [f"{name}={entry}" for name, entry in value.items() if inner[name] is None]
        texts += [f"{name}:{key}={entry}" for name, entries in inner.items() for key, entry in (entries or {}).items()]
    return [word for text in texts for word in (option.opts[0], str(text).lower() if text is False else str(text))]


def test_every_flag_arrives() -> None:
    flags = {option.name: option for option in start.params if isinstance(option, click.Option)}
    said = tomllib.loads(EVERY_KEY)
    keys = {f"{table}.{key}": value for table in (*TABLES, "broker") for key, value in said[table].items()}
    keys |= {key: value for key, value in said.items() if key not in (*TABLES, "broker")}
    words = [word for key, value in keys.items() for word in list_words(flags[key], value)]
    assert list_keys(flagged(*words)) == said


@pytest.mark.parametrize(("text", "meant"), [("0.5", 0.5), ("1.0", 1.0), ("1", 1), ("8", 8)])
def test_the_cohort_is_a_share_with_a_point_and_a_number_without(text: str, meant: float) -> None:
    cohort = flagged("--cohort", text).run.cohort
    assert cohort == meant
    assert type(cohort) is type(meant)


def test_flags_win_over_the_file_key_by_key() -> None:
    values = {
        "rounds": 3,
        "seed": 4,
        "classes": ["old", "older"],
        "options": {"epochs": 2, "lr": 0.5},
        "variants": {"jetson-*": {"epochs": 3, "lr": 0.5}, "pi-1": {"epochs": 4}},
        "images": {"flip": True, "crop_padding": 2},
        "broker": {"port": 5, "listen": "::1"},
    }
    config = flagged(
        *("--rounds", "9", "-o", "lr=0.25", "--images.no-flip", "--broker.port", "6", "--class", "a"),
        *("--class", "b", "--variant", "jetson-*:lr=0.25"),
        values=values,
    )
    assert (config.run.rounds, config.run.seed, config.run.classes) == (9, 4, ("a", "b"))
    assert config.run.options == {"epochs": 2, "lr": 0.25}
    assert config.run.variants == {"jetson-*": {"epochs": 3, "lr": 0.25}, "pi-1": {"epochs": 4}}
    assert config.run.images == ImageConfig(flip=False, crop_padding=2)
    assert config.broker == BrokerConfig(port=6, listen="::1")
    assert values["options"] == {"epochs": 2, "lr": 0.5}, "the file's values are left as they are"
    assert values["variants"] == {"jetson-*": {"epochs": 3, "lr": 0.5}, "pi-1": {"epochs": 4}}


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"broker": "localhost"}, ("--broker.port", "0")),
        ({"images": 3}, ("--images.flip",)),
        ({"options": 3}, ("-o", "epochs=2")),
        ({"variants": 3}, ("--variant", "pi:epochs=2")),
        ({"variants": {"pi": 3}}, ("--variant", "pi:epochs=2")),
    ],
)
def test_a_flag_does_not_hide_a_mistake_in_the_file(values: dict[str, Any], flag: tuple[str, ...]) -> None:
    [key] = values
    with pytest.raises(ConfigError, match=f"{key} = .*table"):
        flagged(*flag, values=values)


@pytest.mark.parametrize(
    "flags",
    [
        ("--cohort", "many"),
        ("-o", "epochs=many"),
        ("-o", "epochs"),
        ("--pretrained", "3"),
        ("--variant", "epochs=3"),
        ("--variant", "pi:epochs"),
        ("--variant", "pi:epochs=many"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=re.split("[:=]", flags[1])[-1]):
        flagged(*flags)


# --- budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ({}, Budget()),
        ({"memory_budget": "512MB"}, Budget(memory_bytes=512_000_000)),
        ({"memory_budget": "1 GiB"}, Budget(memory_bytes=2**30)),
        ({"memory_budget": 300_000_000}, Budget(memory_bytes=300_000_000)),
        ({"flops_budget": "2TFLOP"}, Budget(flops_per_round=2 * 10**12)),
        ({"flops_budget": 5e11}, Budget(flops_per_round=5 * 10**11)),
        ({"round_deadline": "1h30m"}, Budget(round_deadline_s=5400.0)),
        ({"round_deadline": 12.5}, Budget(round_deadline_s=12.5)),
        ({"upload_budget": "5MB"}, Budget(upload_bytes=5_000_000)),
    ],
)
def test_budgets_have_units(given: dict[str, Any], budget: Budget) -> None:
    """Or are in the base unit: bytes, FLOPs, seconds."""
    assert checked_config({"budget": given}, FILE).run.budget.limits() == budget
    assert BudgetConfig(**given).limits() == budget


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("memory_budget", "512 pages", "a number of bytes"),
        ("memory_budget", "0", "must be finite and > 0"),
        ("memory_budget", -5.0, "a number of bytes"),
        ("flops_budget", "fast", "a number of FLOPs"),
        ("round_deadline", "soon", "a number of seconds"),
        ("upload_budget", "5MFLOP", "a number of bytes"),
    ],
)
def test_a_budget_that_cannot_be_read_is_named(key: str, value: Any, expected: str) -> None:
    """Key, value, what is expected, and the file."""
    with pytest.raises(ConfigError) as refused:
        checked_config({"budget": {key: value}}, FILE)
    for part in (FILE, key, repr(str(value)), expected):
        assert part in str(refused.value)


def test_an_unknown_budget_is_named() -> None:
    with pytest.raises(ConfigError, check=has_code("FV1002")):
        checked_config({"budget": {"memory": "512MB"}}, FILE)
    with pytest.raises(ConfigError, check=has_code("FV1004")):
        checked_config({"budget": {"upload_budget": True}}, FILE)


# --- updates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "updates", "reason"),
    [
        ("fedavg", {"up": "int4"}, "updates: up: unknown codec 'int4'; known are none, fp16, int8, top_k"),
        ("fedavg", {"down": "top_k:share=2"}, "updates: down: top_k: share = 2.0 must be above 0 and at most 0.5"),
        (
            "fedavg",
            {"down_whole": "top_k"},
            "updates: down_whole = 'top_k': top_k supports changes of trained tensors only",
        ),
        (
            "fedper",
            {"up_groups": {"head": "none"}},
            "updates: up_groups: group 'head' is not sent back; of method 'fedper' these are: shared",
        ),
        ("fedavg", {"features": "fp16"}, "updates: features = 'fp16': method 'fedavg' sends nothing of that kind"),
        ("eftvit", {"up": "int8"}, "updates: up = 'int8': method 'eftvit' sends nothing of that kind"),
        ("local", {"down": "int8"}, "updates: down = 'int8': method 'local' sends nothing of that kind"),
    ],
)
def test_codecs_of_what_is_not_there_are_refused(method: str, updates: dict[str, Any], reason: str) -> None:
    assert refusal(method=method, updates=updates).endswith(reason)


def test_a_group_may_have_a_codec_of_its_own() -> None:
    updates = UpdatesConfig(up="int8", up_groups={"head": "top_k"})
    assert updates.up_of("body") == "int8"
    assert updates.up_of("head") == "top_k:share=0.05"
    with pytest.raises(ConfigError, check=has_code("FV1003")):
        flagged("--updates.up-group", "head")
