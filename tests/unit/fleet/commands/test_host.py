"""A host of virtual devices imports what it needs, which is a large part of the time until its devices have joined."""

from tests.support.children import in_child


def test_host_without_a_deployment_needs_no_cryptography() -> None:
    in_child("import sys; sys.modules['cryptography'] = None; import fleet.commands.host")  # an import of None fails
