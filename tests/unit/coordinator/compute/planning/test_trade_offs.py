"""Which options are reduced for a small device, and in which order of preference."""

import pytest

from coordinator.compute.planning.trade_offs import trade_offs
from fedvit.errors import ConfigError
from fedvit.methods import make_method
from fedvit.methods.eftvit import EFTViT
from fedvit.models import SMALL, build_vit
from tests.support.codes import has_code
from tests.support.quadratic import small


def test_less_work_that_the_paper_found_harmless_is_preferred() -> None:
    """Accuracy holds up to a mask of .75, and with 2 local blocks it is that of 6: both come before fewer epochs."""
    deep = build_vit(SMALL, 5, seed=0, options={"image_size": 8, "patch_size": 4, "width": 4, "depth": 8, "heads": 1})
    method = EFTViT(mask=0.5, local_blocks=6, epochs=5)
    quality = {trade_off.option: dict(trade_off.values) for trade_off in trade_offs(method, deep)}
    assert quality["mask"][0.75] > quality["epochs"][4]
    assert quality["local_blocks"][2] > quality["epochs"][4]
    assert quality["mask"][0.85] < quality["epochs"][4]
    assert quality["local_blocks"][1] < quality["epochs"][4]


def test_frozen_precision_is_reduced_only_where_weights_are_never_moved() -> None:
    """A copy of FedBABU's head is tuned before a test, which takes float32."""
    options = {
        name: {each.option for each in trade_offs(make_method(name), small(3))} for name in ("fedbabu", "fed_head")
    }
    assert "frozen_precision" not in options["fedbabu"]
    assert "frozen_precision" in options["fed_head"]


def test_memory_of_an_optimizer_is_packed_where_it_has_one_and_devices_sum_gradients() -> None:
    def find(name: str, **options: object) -> list[tuple[object, float]]:
        method = make_method(name, options)
        return [one for each in trade_offs(method, small(3)) if each.option == "optimizer_bits" for one in each.values]

    assert find("fedavg", optimizer="adamw") == find("fedavg", momentum=0.9) == [(8, 0.99)]
    assert not find("fedavg")
    assert not find("fedavg", optimizer="adamw", optimizer_bits=8)
    assert not find("apfl", optimizer="adamw")
    with pytest.raises(ConfigError, check=has_code("FV1104", "'apfl' makes whole steps")):
        make_method("apfl", {"optimizer_bits": 8})


def test_ranks_halve_and_drawn_blocks_become_fewer_one_by_one() -> None:
    deep = build_vit(SMALL, 5, seed=0, options={"image_size": 8, "patch_size": 4, "width": 4, "depth": 8, "heads": 1})

    def list_values(name: str, option: str, **options: object) -> list[object]:
        [found] = [each for each in trade_offs(make_method(name, options), deep) if each.option == option]
        qualities = [quality for _, quality in found.values]
        assert qualities == sorted(qualities, reverse=True)
        return [value for value, _ in found.values]

    assert list_values("flexlora", "own_rank", rank=8) == [4, 2, 1]
    assert list_values("flexlora", "own_rank", rank=8, own_rank=3) == [1]
    assert list_values("fedra", "layers") == [3, 2, 1]
    assert list_values("fedra", "layers", layers=3) == [2, 1]
