"""One plugin of each kind, as small as it can be: see docs/plugins.md of fedvit."""
