"""Models, their states on devices, and promotions."""

from alembic import op

from coordinator.record.tables import DEVICE_MODELS, MODELS, PROMOTIONS

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    for table in (MODELS, DEVICE_MODELS, PROMOTIONS):
        table.create(op.get_bind(), checkfirst=True)  # the first migration makes the tables as they are now
