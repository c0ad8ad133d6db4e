"""A folder for the Hugging Face Hub: timm's files, and a model card with its metadata. Nothing is sent."""

import json
from collections.abc import Iterator
from pathlib import Path

from export.bundle.card import describe_personal, describe_training
from export.bundle.write import README, TrainedModel, new_folder
from export.formats.timm_folder import fill
from fedvit.files import atomic_write


def write(out: Path, trained: TrainedModel) -> list[str]:
    """Write the folder. Raises ConfigError if timm has no such model."""
    with new_folder(out) as folder:
        fill(folder, trained)
        atomic_write(folder / README, make_card(trained).encode())
    return [f"Hugging Face folder: {out}", f"  hf upload NAME/MODEL {out}    (pip install 'fedvit[huggingface]')"]


def make_card(trained: TrainedModel) -> str:
    """Return the model card: metadata of the Hub in YAML, and the same facts as a bundle's card."""
    origin, reported = trained.origin, trained.reported
    whose = f"the model of device {origin.device}" if origin.device else "one model for all devices"
    lines = [
        "---",
        *_metadata(trained),
        "---",
        "",
        f"# {origin.model}, trained by {origin.method}",
        "",
        f"Federated training: run {origin.run}, after round {origin.round}; {whose}. Made by {origin.made_by}.",
        *describe_personal(origin),
        *describe_training(trained.training, trained.licence, reported),
        "",
        "## Use",
        "",
        "```python",
        'model = timm.create_model("hf-hub:NAME/MODEL", pretrained=True)',
        "```",
        "",
        f"Pictures: RGB, both sides resized to {trained.batch.image_size}, bilinear; mean {list(trained.batch.mean)}, "
        f"std {list(trained.batch.std)}.",
        "",
        f"Classes: {', '.join(trained.classes)}",
        "",
    ]
    return "\n".join(lines)


def _metadata(trained: TrainedModel) -> Iterator[str]:
    """Yield lines of YAML; texts are written as JSON strings, which YAML reads."""
    yield "library_name: timm"
    yield "pipeline_tag: image-classification"
    yield "tags: [image-classification, timm, federated-learning]"
    if trained.licence:
        yield f"license: {json.dumps(trained.licence)}"
    if reported := trained.reported:
        yield "model-index:"
        yield f"- name: {json.dumps(trained.origin.model)}"
        yield "  results:"
        yield "  - task: {type: image-classification}"
        yield '    dataset: {name: "test images of the devices", type: private}'
        yield f"    metrics: [{{type: accuracy, value: {reported.accuracy}}}]"
