"""Everything that needs torch: plans, graphs, Programs, tensors made for one device, and the server's step.

The control side of a run sends requests (`messages`), and imports only `messages` and `process` of this package.
`Engine` answers in the calling process; `Worker` starts a process of its own (docs/decisions/0022).
"""
