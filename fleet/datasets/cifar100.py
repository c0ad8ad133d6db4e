"""The two levels of classes of CIFAR-100, for files that name the fine level only.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; both levels are in the
order of the data set's own label numbers.
"""

from collections.abc import Sequence

import numpy as np

from fedvit.data.images import Indices

COARSE: dict[str, tuple[str, ...]] = {
    "aquatic_mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food_containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit_and_vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household_electrical_devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household_furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large_carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large_man-made_outdoor_things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large_natural_outdoor_scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large_omnivores_and_herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium_mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect_invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small_mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles_1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles_2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}

FINE: tuple[str, ...] = tuple(sorted(name for names in COARSE.values() for name in names))

_COARSE_OF = {name: coarse for coarse, names in enumerate(COARSE.values()) for name in names}


def coarse_labels(classes: Sequence[str], labels: Indices) -> Indices | None:
    """The coarse label of each sample, where `classes` are those of CIFAR-100; None for other classes."""
    if set(classes) != set(FINE):
        return None
    return np.array([_COARSE_OF[name] for name in classes], dtype=np.int64)[labels]
