"""Laws of methods, on a small model. In a checkout `make test-method METHOD=NAME` runs many more."""

from fedvit.methods import build_model, make_method, method_class
from fedvit.methods.base import Method
from fedvit.model_options import SMALL
from fedvit.models.vit import PatchViT
from fleet.contracts.laws import Law, require
from fleet.contracts.training import CLASSES, OPTIONS, SMALL_MODEL, Samples, check_engines, check_graphs


def name_its_source(name: str) -> None:
    """It names its source, as `source` and in its docstring."""
    kind = method_class(name)
    require(bool(kind.source), "`source` is empty")
    require("Source" in (kind.__doc__ or ""), "its docstring has no line 'Source: ...'")


def give_every_tensor_a_role(name: str) -> None:
    """Every tensor of the model is in one group, and something is trained or collected."""
    method, vit = _build(name)
    names = [tensor for _, group in method.groups(vit).values() for tensor in group]
    require(len(names) == len({*names}), "a tensor is in two groups")
    require(vit.tensors().keys() <= {*names}, f"no group has {sorted(vit.tensors().keys() - {*names})}")


def agree_with_torch(name: str) -> None:
    """Its graphs, which devices run, compute what torch computes."""
    check_graphs(*_build(name))


def train_the_same_on_both_engines(name: str) -> None:
    """Two rounds give the same tensors on onnxruntime, as on devices, and on torch."""
    method, vit = _build(name)
    reads_images = method.server_rule(vit).needs_images
    settings = {"method": name, "model_options": SMALL_MODEL}
    check_engines(settings, Samples(SMALL_MODEL["image_size"]), reads_images=reads_images)


LAWS: tuple[Law, ...] = (
    name_its_source,
    give_every_tensor_a_role,
    agree_with_torch,
    train_the_same_on_both_engines,
)


def _build(name: str) -> tuple[Method, PatchViT]:
    method = make_method(name, OPTIONS)
    return method, build_model(method, SMALL, CLASSES, seed=0, options=SMALL_MODEL)
