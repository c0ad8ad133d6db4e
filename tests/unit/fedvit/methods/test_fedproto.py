"""FedProto: a device's loss, its sums and the server's prototypes beside the paper's equations."""

import numpy as np
import torch

from fedvit.methods import make_method
from fedvit.methods.base import Images, ServerState
from fedvit.methods.class_sums import IMAGES, KNOWN, PROTOTYPES, SUM_UP, SUMS, TOTAL, read_features
from fedvit.methods.fedproto import FedProto
from fedvit.methods.step import example_inputs
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.method_steps import make_context, run_step
from tests.support.quadratic import BATCH, Inputs, in_double, small
from tests.support.steps import whole
from tests.support.uploads import upload

LR, LAM = 0.05, 0.5


def inputs_of(method: FedProto, vit: PatchViT, graph: str = "train") -> Inputs:
    [phase] = [phase for phase in method.phases(vit) if phase.graph == graph]
    inputs = in_double(example_inputs(method, vit, BATCH, whole(phase)))
    known = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    return inputs | {"hyper/lr": torch.tensor(LR, dtype=torch.float64), f"tensor/{KNOWN}": known}


def test_a_step_pulls_features_to_the_prototypes_that_are_known() -> None:
    vit, method = small(), FedProto(lam=LAM)
    inputs = inputs_of(method, vit)
    after = run_step(method, vit, inputs)
    leaves = {name: inputs[f"tensor/{name}"].clone().requires_grad_() for name in vit.tensors()}
    features, logits = read_features(vit, leaves, Images(inputs["batch/patches"], None))
    labels, weight = inputs["batch/labels"], inputs["batch/weight"]
    entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    apart = ((features - inputs[f"tensor/{PROTOTYPES}"][labels]) ** 2).mean(dim=1) * inputs[f"tensor/{KNOWN}"][labels]
    ((entropy + LAM * apart) * weight).sum().div(weight.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        want = inputs[f"tensor/{name}"] - LR * leaf.grad
        torch.testing.assert_close(after[f"new/tensor/{name}"], want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(after["metric/loss"], (entropy * weight).sum().detach() / weight.sum())


def test_prototypes_are_the_means_of_all_devices_images() -> None:
    """Two devices with other models and two batches each; a class that nobody has keeps its prototype."""
    vit, method = small(classes=4), FedProto()
    uploads, features_of, labels_of = [], [], []
    for device in (0, 1):
        total = images = torch.zeros(4, vit.width + 1, dtype=torch.float64)
        for batch in (0, 1):
            [phase] = [phase for phase in method.phases(vit) if phase.graph == SUM_UP]
            inputs = in_double(example_inputs(method, vit, BATCH, whole(phase), seed=2 * device + batch))
            inputs["batch/labels"] %= 3
            inputs |= {f"tensor/{name}": value.double() * (1.0 + device) for name, value in vit.tensors().items()}
            inputs |= {f"slot/{TOTAL}/{SUMS}": total, f"slot/{IMAGES}/{SUMS}": images}
            after = run_step(method, vit, inputs, SUM_UP)
            total, images = after[f"new/slot/{TOTAL}/{SUMS}"], after[f"new/slot/{IMAGES}/{SUMS}"]
            real = inputs["batch/weight"] > 0
            tensors = {name: inputs[f"tensor/{name}"] for name in vit.tensors()}
            features_of.append(read_features(vit, tensors, Images(inputs["batch/patches"], None))[0][real])
            labels_of.append(inputs["batch/labels"][real])
        uploads.append(upload(f"device-{device}", int(images[0, 0]), {SUMS: after[f"new/tensor/{SUMS}"].numpy()}))
    before = {SUMS: np.zeros((4, vit.width + 1)), PROTOTYPES: np.full((4, vit.width), 7.0), KNOWN: np.zeros(4)}
    state, _ = method.server_rule(vit).close(ServerState(before), uploads, make_context(vit))
    features, labels = torch.cat(features_of), torch.cat(labels_of)
    for label in range(3):
        want = features[labels == label].mean(dim=0)
        np.testing.assert_allclose(state.tensors[PROTOTYPES][label], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.tensors[PROTOTYPES][3], 7.0)
    np.testing.assert_array_equal(state.tensors[KNOWN], [1, 1, 1, 0])
    np.testing.assert_array_equal(state.tensors[SUMS], 0)


def test_the_nearest_known_prototype_answers() -> None:
    vit, method = small(), FedProto()
    images = Images(torch.randn(5, 4, 192, generator=torch.Generator().manual_seed(0)), None)
    tensors = method.tensors(vit)
    features, logits = read_features(vit, tensors, images)
    torch.testing.assert_close(method.predict(vit, tensors, images, None), logits)
    prototypes = features[:3] + 0.01
    tensors |= {PROTOTYPES: prototypes, KNOWN: torch.tensor([1.0, 0.0, 1.0])}
    answers = method.predict(vit, tensors, images, None).argmax(dim=1)
    distances = torch.cdist(features, prototypes[[0, 2]])
    assert answers.tolist() == [2 * place for place in distances.argmin(dim=1).tolist()]
    by_head = make_method("fedproto", {"answer_by": "head"})
    torch.testing.assert_close(by_head.predict(vit, tensors, images, None), logits)


def test_prototypes_bring_features_of_a_class_together() -> None:
    """Features end nearer to the prototypes than without the pull, and the model never leaves the device."""
    vit, apart = small(), {}
    for lam in (0.0, 1.0):
        method = FedProto(lam=lam)
        inputs = inputs_of(method, vit)
        for _ in range(20):
            after = run_step(method, vit, inputs)
            inputs |= {name.removeprefix("new/"): v for name, v in after.items() if name.startswith("new/")}
        tensors = {name: inputs[f"tensor/{name}"] for name in vit.tensors()}
        features, _ = read_features(vit, tensors, Images(inputs["batch/patches"], None))
        known = inputs[f"tensor/{KNOWN}"][inputs["batch/labels"]] * inputs["batch/weight"] > 0
        apart[lam] = float((features - inputs[f"tensor/{PROTOTYPES}"][inputs["batch/labels"]])[known].square().mean())
    assert apart[1.0] < 0.5 * apart[0.0]
    assert set(method.names_with(vit, Role.LOCAL)) == set(vit.tensors())
    assert method.names_with(vit, Role.SHARED) == [SUMS]
