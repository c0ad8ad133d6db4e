"""`python -m bench step`: both sides are the same maths, and the whole command runs through on a tiny case."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from bench.cases import CASES, Case, choose
from bench.child import run_child
from bench.commands import bench_command
from bench.machine import DEVICE_PACKAGES, TORCH_PACKAGES, describe_machine, list_requirements
from bench.step import StepSettings, run_step_bench
from bench.torch_models import MODELS, make_optimizer
from fedvit.data.images import unfold
from fedvit.errors import ConfigError, FedvitError
from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.codes import has_code
from tests.support.counterparts import for_torchs_lstm, of_timms_resnet
from tests.support.plays import LSTM_MODEL
from tests.support.tiny import TINY_MODEL

TRAINED = [role for role in Role if role.is_trained_on_device]


def known(case: Case) -> Case:
    """Without what only says how frozen weights are kept and multiplied by: it is no part of the maths."""
    options = {name: value for name, value in case.options.items() if name not in ("frozen_precision", "compute")}
    return replace(case, options=options)


def tiny(case: Case) -> Case:
    """The same method on a model as small as they come, of Transformers 16 patches and 3 blocks of width 32."""
    smaller = {"batch_size": 2} | ({"bottleneck": 8} if "bottleneck" in case.options else {})
    if case.torch == "resnet":
        return replace(case, model="resnet18", model_options={"image_size": 32}).with_options(**smaller)
    if case.torch == "lstm":
        return replace(case, model_options=dict(LSTM_MODEL)).with_options(**smaller)
    sizes: dict[str, Any] = {**TINY_MODEL, "qkv_bias": case.model_options.get("qkv_bias", True)}
    return replace(known(case), model=SMALL, model_options=sizes).with_options(**smaller)


def count_trained(model: nn.Module) -> int:
    return sum(value.numel() for value in model.parameters() if value.requires_grad)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestCase:
    def test_as_many_numbers_are_trained_on_both_sides(self, case: Case) -> None:
        method = make_method(case.method, known(case).options)
        with torch.device("meta"):
            vit = build_model(method, case.model, case.classes, seed=0, options=case.model_options)
            theirs = MODELS[case.torch](case)
            tensors = method.tensors(vit)
            ours = sum(tensors[name].numel() for name in method.names_with(vit, *TRAINED))
        assert count_trained(theirs) == ours

    def test_equal_weights_give_equal_answers(self, case: Case) -> None:
        """Full images, on the tiny model: what is left is rounding."""
        small = tiny(case)
        method = make_method(small.method, small.options)
        vit = build_model(method, small.model, small.classes, seed=0, options=small.model_options)
        model = MODELS[small.torch](small).eval()
        names = dict(vit.tensors())
        if case.torch == "lstm":
            assert_equal_answers(vit, model)
            return
        with torch.no_grad():
            for name, value in model.named_parameters():
                named = of_timms_resnet(small.model, name) if case.torch == "resnet" else ours_for(name, names)
                value.copy_(names.pop(named))
        assert not names
        pictures = np.random.default_rng(0).standard_normal((2, 32, 32, 3), np.float32)
        patches = torch.from_numpy(unfold(pictures, vit.patch_size))
        with torch.no_grad():
            ours = method.forward(vit, method.tensors(vit), Images(patches, None)).logits
            theirs = model(torch.from_numpy(pictures).permute(0, 3, 1, 2))
        rounding = {"rtol": 1e-4, "atol": 1e-4} if case.torch == "resnet" else {}  # of sums over many pixels
        torch.testing.assert_close(theirs, ours, **rounding)

    def test_the_torch_side_has_the_methods_optimizer(self, case: Case) -> None:
        method = make_method(case.method, known(case).options)
        values = [nn.Parameter(torch.zeros(1))]
        wanted = method.optimizer_rule().in_torch(values, method.lr)
        made = make_optimizer(case, nn.ParameterList(values))
        assert type(made) is type(wanted)
        assert made.defaults == wanted.defaults
        assert (method.epochs, method.batch_size) == (1, case.batch_size)


def assert_equal_answers(vit: PatchViT, model: Any) -> None:
    """Of an LSTM, with the same weights on both sides."""
    tensors, tokens = vit.tensors(), torch.randint(0, vit.classes, (2, 8))
    with torch.no_grad():
        model.embedding.weight.copy_(tensors["token_embed.weight"])
        model.head.load_state_dict({name: tensors[f"head.{name}"] for name in ("weight", "bias")})
        for layer in range(vit.depth):
            for name, value in for_torchs_lstm(tensors, layer).items():
                getattr(model.lstm, name).copy_(value)
        ours = vit.classify(vit.run_to_class(vit.embed(tokens), 0))
        torch.testing.assert_close(model(tokens).transpose(1, 2), ours)


def ours_for(name: str, names: dict[str, torch.Tensor]) -> str:
    """What a tensor of the torch side is called in the method's model."""
    inner = name.removeprefix("vit.").replace(".attn.down.", ".attn.adapter.down.")
    inner = inner.replace(".attn.up.", ".attn.adapter.up.").replace("prompts", "prompts.tokens")
    assert inner in names, f"{name} has no counterpart among {sorted(names)}"
    return inner


def test_the_mask_leaves_as_many_tokens_on_both_sides() -> None:
    """EFTViT drops 75 % of 196 patches: 49 are left, and the class token."""
    (case,) = choose(["eftvit-vitb"])
    with torch.device("meta"):
        vit: Any = MODELS[case.torch](case)
    kept = vit.train().patch_drop(torch.zeros(1, 197, 4))
    assert kept.shape == (1, 50, 4)


@pytest.fixture(scope="module")
def report(graph_cache: Path) -> dict[str, Any]:
    """The whole benchmark on a tiny EFTViT."""
    case = tiny(choose(["eftvit-vitb"])[0]).with_options(local_blocks=1, mask=0.5, compute="int8")
    lines: list[str] = []
    settings = StepSettings(steps=2, rounds=1, product_side=64)
    report = run_step_bench([case], settings, cache=graph_cache, progress=lines.append)
    assert any(line.startswith("eftvit-vitb: onnx 1/1") for line in lines)
    return dict(json.loads(msgspec.json.encode(report)))


@pytest.mark.slow
def test_sides_have_all_figures(report: dict[str, Any]) -> None:
    (case,) = report["cases"]
    assert (case["name"], case["compute"], case["batch_size"]) == ("eftvit-vitb", "int8", 2)
    assert case["gflop"] > 0
    for side in ("onnx", "torch", "torch_bf16"):
        figures = case[side]
        assert figures["step_s_runs"] == [figures["step_s"]]
        assert figures["over_floor"] == pytest.approx(figures["step_s"] / figures["gemm_floor_s"])
        assert min(figures["import_s"], figures["peak_rss_bytes"], figures["installed_bytes"]) > 0


@pytest.mark.slow
def test_ratios_are_ours_by_torchs(report: dict[str, Any]) -> None:
    (case,) = report["cases"]
    ratio, onnx, theirs = case["ratio"], case["onnx"], case["torch"]
    assert ratio["step"] == pytest.approx(onnx["step_s"] / theirs["step_s"])
    assert ratio["step_bf16"] == pytest.approx(onnx["step_s"] / case["torch_bf16"]["step_s"])
    assert ratio["peak_rss"] == pytest.approx(onnx["peak_rss_bytes"] / theirs["peak_rss_bytes"])
    assert ratio["installed"] == pytest.approx(onnx["installed_bytes"] / theirs["installed_bytes"])


def test_report_has_the_machine_and_rates_of_products(report: dict[str, Any]) -> None:
    assert report["machine"] == json.loads(msgspec.json.encode(describe_machine()))
    assert {"onnxruntime", "torch", "timm"} <= report["machine"]["versions"].keys()
    products = report["products"]
    assert products.pop("side") == 64
    assert products.keys() == {"onnx_gflops", "onnx_int8_gflops", "torch_gflops", "torch_bf16_gflops"}
    assert min(products.values()) > 0


def test_compute_is_chosen_for_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []

    def stop(cases: list[Case], *_: Any, **__: Any) -> None:
        asked.extend(cases)
        raise ConfigError("FV0002", "enough")

    monkeypatch.setattr("bench.commands.run_step_bench", stop)
    for flags in ([], ["--compute", "fp32"], ["--compute", "int8"]):
        CliRunner().invoke(bench_command, ["step", "--case", "pfedpg-vitb", "--case", "eftvit-vitb-b8-int8", *flags])
    assert [case.compute for case in asked] == ["fp32", "int8", "fp32", "fp32", "int8", "int8"]


def test_process_that_fails_is_reported_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(FedvitError, check=has_code("FV1218")):
        run_child("bench.onnx_side", str(tmp_path), "1", "1", "plain", what="made: onnx")


def test_an_unknown_case_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, check=has_code("FV0002")):
        choose(["eftvit"])
    result = CliRunner().invoke(bench_command, ["step", "--case", "nope"])
    assert isinstance(result.exception, ConfigError)


def test_packages_are_counted_with_what_they_need() -> None:
    """A device has no torch; torch's side has what torch and timm bring along."""
    device = {package.name for package in list_requirements(DEVICE_PACKAGES)}
    theirs = {package.name for package in list_requirements(TORCH_PACKAGES)}
    assert {"onnxruntime", "numpy", "pillow", "protobuf"} <= device
    assert not {"torch", "timm", "onnx"} & device
    assert {"torch", "torchvision", "timm", "numpy", "sympy"} <= theirs
