"""A real PostgreSQL server on loopback."""

from bench.postgresql_server import PASSWORD, USER, Postgresql

__all__ = ["PASSWORD", "USER", "Postgresql"]
