"""Tables of a deployment's registry."""

from sqlalchemy import Boolean, Column, Float, Integer, MetaData, String, Table

from coordinator.record.audit import make_audit_table

TABLES = MetaData()

DEVICES = Table(
    "devices",
    TABLES,
    Column("name", String, primary_key=True),
    Column("joined_at", Float, nullable=False),
    Column("last_seen", Float),
    Column("revoked_at", Float),
    Column("misuses", Integer, nullable=False),
)

CERTIFICATES = Table(
    "certificates",
    TABLES,
    Column("serial", String, primary_key=True),
    Column("device", String, nullable=False, index=True),
    Column("issued_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
)

TOKENS = Table(
    "tokens",
    TABLES,
    Column("id", String, primary_key=True),
    Column("device", String, nullable=False, index=True),
    Column("secret", String, nullable=False),
    Column("expires_at", Float, nullable=False, index=True),
    Column("replaces", Boolean, nullable=False),
    Column("request", String),
    Column("certificate", String),
    Column("withdrawn", Boolean, nullable=False),
)

REVOKED = Table(
    "revoked",
    TABLES,
    Column("serial", String, primary_key=True),
    Column("device", String, nullable=False),
    Column("generation", Integer, nullable=False, index=True),
)

COUNTERS = Table(
    "counters", TABLES, Column("generation", Integer, nullable=False), Column("clock_s", Float, nullable=False)
)
"""One row. `generation` counts the changes of files that a broker reads; `clock_s` is the newest date that is right."""

AUDIT = make_audit_table(TABLES)
