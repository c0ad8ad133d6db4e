"""Costs in the methods' papers, beside the figures of their own way of counting and those of a Program.

Only figures of the same model and options are compared.
Sources: EFTViT (arXiv:2412.00334), FedPerfix (arXiv:2308.09160), pFedPG (arXiv:2308.15367).
"""

from profiles.prediction import ProgramCost
from profiles.report.document import PublishedFigure
from profiles.vit_cost import EFTVIT_CONVENTION, VitShape, forward_macs, parameters

EFTVIT = "EFTViT, arXiv:2412.00334"
FEDPERFIX = "FedPerfix, arXiv:2308.09160"
PFEDPG = "pFedPG, arXiv:2308.15367"

EFTVIT_GMACS = {0.0: 12.005, 0.25: 8.914, 0.5: 5.911, 0.75: 2.997, 0.95: 0.684}
"""Table 4, by mask ratio; ViT-B/16 at 224 px."""
EFTVIT_PARAMETERS = {2: (14.23, 10), 4: (27.82, 100), 6: (41.34, 100)}
"""Table 5, by local blocks: millions, and the classes of the head that the count agrees with."""
NO_PROJECTIONS = (
    "multiply-adds of a forward pass without attention's projections; norms at 5 per element; all patches embedded"
)
NO_PRODUCTS = (
    "multiply-adds of a forward pass without the products of queries, keys and values; norms at 5 per element; all "
    "patches embedded"
)


def find_published(cost: ProgramCost) -> list[PublishedFigure]:
    """Published figures of the method and model of `cost`; none for most."""
    found: list[PublishedFigure] = []
    forward = cost.flops_forward / cost.batch_size / 2 / 1e9
    if cost.model == "vit_base_patch16_224":
        found += _eftvit(cost, forward)
    if cost.model == "vit_small_patch16_224" and cost.method == "fedperfix":
        found += _fedperfix(cost, forward)
    if cost.model == "vit_base_patch16_224" and cost.method == "pfedpg" and cost.options.get("tokens") == 10:
        sent = cost.parameters_trained - cost.parameters_local
        found.append(
            PublishedFigure(
                "numbers sent each way, Table 1", "", 7680, 10 * 768, sent, "10 prompts of 768 numbers", PFEDPG
            )
        )
    return found


def _eftvit(cost: ProgramCost, forward: float) -> list[PublishedFigure]:
    """Tables 3 to 5 of EFTViT's paper, which also count baselines."""
    shape = VitShape(classes=100)

    def count_gmacs(mask: float = 0.0, tokens: int = 0) -> float:
        return forward_macs(shape, EFTVIT_CONVENTION, mask_ratio=mask, extra_tokens=tokens) / 1e9

    match cost.method:
        case "eftvit":
            figures = []
            if cost.mask_ratio in EFTVIT_GMACS:
                figures.append(
                    PublishedFigure(
                        f"forward pass, mask {cost.mask_ratio:g}, Table 4", "GMAC", EFTVIT_GMACS[cost.mask_ratio],
                        count_gmacs(cost.mask_ratio), forward, NO_PROJECTIONS, EFTVIT,
                    )
                )  # fmt: skip
            blocks = cost.options.get("local_blocks")
            if isinstance(blocks, int) and blocks in EFTVIT_PARAMETERS:
                published, classes = EFTVIT_PARAMETERS[blocks]
                numbers = parameters(VitShape(classes=classes), blocks=blocks, final_norm=False)
                figures.append(
                    PublishedFigure(
                        f"numbers trained on a device, M={blocks}, Table 5", "M", published, numbers / 2**20,
                        cost.parameters_trained / 1e6, f"units of 2^20, a head of {classes} classes", EFTVIT,
                    )
                )  # fmt: skip
            return figures
        case "fedavg":
            text = "forward pass, Table 3"
            return [PublishedFigure(text, "GMAC", 12.005, count_gmacs(), forward, NO_PROJECTIONS, EFTVIT)]
        case "fed_prompt" if cost.options.get("tokens") == 10:
            text = "forward pass with 10 prompts, Table 3"
            return [PublishedFigure(text, "GMAC", 12.646, count_gmacs(tokens=10), forward, NO_PROJECTIONS, EFTVIT)]
        case "fed_lora" if cost.options.get("rank") == 16:
            macs = forward_macs(
                shape, EFTVIT_CONVENTION._replace(projections=True, attention_products=False), lora_rank=16
            )
            text = "forward pass with LoRA, Table 3"
            return [PublishedFigure(text, "GMAC", 16.982, macs / 1e9, forward, NO_PRODUCTS, EFTVIT)]
    return []


def _fedperfix(cost: ProgramCost, forward: float) -> list[PublishedFigure]:
    """Table 2 of FedPerfix's paper: adapters of width 256, and timm's head of 1000 classes."""
    held = cost.parameters_trained + cost.parameters_frozen
    sent = cost.parameters_trained - cost.parameters_local
    units = "units of 2^20, a head of 1000 classes"
    return [
        PublishedFigure(
            "numbers on a device, Table 2", "M", 24.42, (22_050_664 + 3_551_232) / 2**20, held / 1e6, units, FEDPERFIX
        ),
        PublishedFigure(
            "numbers sent, Table 2", "M", 20.66, (22_050_664 - 385_000) / 2**20, sent / 1e6, units, FEDPERFIX
        ),
        PublishedFigure(
            "forward pass, Table 2", "GMAC", 0.06658, None, forward,
            "not reproduced; close to patch embedding, norms, activations and head alone", FEDPERFIX,
        ),
    ]  # fmt: skip
