"""All that needs torch: plans, graphs, Programs, what is made for a device, and the server's step.

What controls a run asks for it by `messages`, and never imports anything else of this package but `process`. `Engine`
answers in the process that asks; `Worker` starts a process of its own that answers (docs/decisions/0022).
"""
