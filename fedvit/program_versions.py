"""Versions of Programs: the smallest that a Program needs, so that software refuses what it cannot do."""

PROGRAM_VERSION = 1
PRIVATE_VERSION = 2
"""Version of Programs that ask for privacy: software that supports only the first version refuses them."""
TEXT_VERSION = 3
"""Version of Programs for text, which earlier software cannot read."""
SEEDED_VERSION = 4
"""Version of Programs whose steps read a random number of each sample, which earlier software does not draw."""
SECURE_VERSION = 5
"""Version of Programs whose results are added up in secret: earlier software would send them alone."""
ASSIGNED_VERSION = 6
"""Version of Programs with tensors that the server makes for one device, and that only training reads."""
LABELLED_VERSION = 7
"""Version of Programs with `Batch.labels`, whose labels earlier software does not read."""
VERSIONS = (
    PROGRAM_VERSION, PRIVATE_VERSION, TEXT_VERSION, SEEDED_VERSION, SECURE_VERSION, ASSIGNED_VERSION, LABELLED_VERSION,
)  # fmt: skip
