"""What Alembic runs: every migration on the connection that it is given, in that connection's transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
