"""The list of backbones in docs/backbones.md: `make backbones` exports and verifies each one."""
